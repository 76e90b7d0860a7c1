'use strict';

const { visit } = require('./parsing.cjs');

/** Cheap and too generous: what it lets through is parsed. */
const MODULE_SYNTAX = /\bimport\s*(?:[\w$*{'"\\/]|\.\s*meta\b)|\bexport\b/;

/** The name under which rewritten code finds what it needs. */
const RUNTIME = '__skerry__';

/** Whether code may be that of a module. */
function hasModuleSyntax(code) {
  return MODULE_SYNTAX.test(code);
}

/**
 * Edits that make a module a script: `import` declarations become `await import()`, `export` is left out, `import.meta`
 * is looked up.
 * @returns {Generator<import('./parsing.cjs').Edit>}
 */
function* moduleEdits(program, code) {
  yield* imports(program);
  yield* exports_(program, code);
  if (/\bmeta\b/.test(code)) yield* metaProperties(program);
}

function* imports(program) {
  const declarations = program.body.filter((node) => node.type === 'ImportDeclaration');
  const other = program.body.find((node) => node.type !== 'ImportDeclaration' && !node.directive);
  const late = declarations.filter((node) => other && node.start > other.start);
  // Imports come first wherever they stand.
  if (late.length) yield { start: other.start, end: other.start, text: late.map(loading).join('') };
  for (const node of declarations) yield { ...span(node), text: late.includes(node) ? '' : loading(node) };
}

/** One import declaration as a statement. */
function loading({ source, specifiers, attributes = [] }) {
  const options = attributes.map(({ key, value }) => `${key.raw ?? key.name}: ${value.raw}`);
  const loaded = `await import(${source.raw}${options.length ? `, {with: {${options.join(', ')}}}` : ''})`;
  if (!specifiers.length) return `${loaded};`;
  const whole = specifiers.find(({ type }) => type === 'ImportNamespaceSpecifier')?.local.name;
  const named = specifiers.filter(({ type }) => type !== 'ImportNamespaceSpecifier').map(({ imported, local }) => {
    const name = imported ? (imported.name ?? imported.value) : 'default';
    return [JSON.stringify(name), local.name];
  });
  const members = `{${named.map(([name, local]) => `${name}: ${local}`).join(', ')}}`;
  const names = `[${named.map(([name]) => name).join(', ')}]`;
  const from = (namespace) => `${RUNTIME}.exported(${namespace}, ${source.raw}, ${names})`;
  if (!whole) return `let ${members} = ${from(loaded)};`;
  return `let ${whole} = ${loaded}${named.length ? `, ${members} = ${from(whole)}` : ''};`;
}

function* exports_(program, code) {
  for (const { type, start, end, declaration, source } of program.body) {
    if (type === 'ExportDefaultDeclaration') {
      yield* defaultExport(start, end, declaration, code);
    } else if (type === 'ExportNamedDeclaration' && declaration) {
      yield { start, end: declaration.start, text: '' };
    } else if (type === 'ExportNamedDeclaration' || type === 'ExportAllDeclaration') {
      yield { start, end, text: source ? `await import(${source.raw});` : '' };
    }
  }
}

/** A named function or class stays a declaration; anything else is an expression, and thereby the result. */
function* defaultExport(start, end, declaration, code) {
  if (/^(?:Function|Class)Declaration$/.test(declaration.type) && declaration.id) {
    yield { start, end: declaration.start, text: '' };
  } else {
    yield { start, end: declaration.start, text: ';(' };
    yield { start: declaration.end, end: declaration.end, text: code[end - 1] === ';' ? ')' : ');' };
  }
}

function metaProperties(program) {
  const edits = [];
  visit(program, {
    MetaProperty(node) {
      if (node.meta.name === 'import') edits.push({ ...span(node), text: `${RUNTIME}.meta` });
    },
  });
  return edits;
}

function span({ start, end }) {
  return { start, end };
}

module.exports = { RUNTIME, hasModuleSyntax, moduleEdits };
