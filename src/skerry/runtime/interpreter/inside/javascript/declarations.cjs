'use strict';

const { edited, visit } = require('./parsing.cjs');

/**
 * Edits that make `const` at the top `let`: V8's REPL mode lets a later cell repeat a declaration, but not with
 * the other word. Where the cell itself assigns to the constant it stays one, for that to fail as it should.
 * @returns {import('./parsing.cjs').Edit[]}
 */
function constants(program) {
  const declarations = program.body
    .map((node) => (node.type === 'ExportNamedDeclaration' ? node.declaration : node))
    .filter((node) => node?.type === 'VariableDeclaration' && node.kind === 'const');
  if (!declarations.length) return [];
  const assigned = new Set();
  const assign = (target) => names(target).forEach((name) => assigned.add(name));
  visit(program, {
    AssignmentExpression: ({ left }) => assign(left),
    UpdateExpression: ({ argument }) => assign(argument),
    ForInStatement: ({ left }) => assign(left),
    ForOfStatement: ({ left }) => assign(left),
  });
  return declarations
    .filter((node) => !declaredIn(node).some((name) => assigned.has(name)))
    .map(({ start }) => ({ start, end: start + 'const'.length, text: 'let  ' }));
}

/**
 * The same code with `name` declared as the kind that it already is: REPL mode refuses `const f` after `function f`,
 * and `var x` after `let x`.
 * @returns {string | undefined} undefined if nothing at the top declares it
 */
function redeclared(program, code, name) {
  for (const node of program.body) {
    if (/^(?:Function|Class)Declaration$/.test(node.type) && node.id.name === name) {
      const kind = node.type === 'ClassDeclaration' ? 'var' : 'let';
      const { start, end } = node;
      return edited(code, [{ start, end: start, text: `${kind} ${name}=` }, { start: end, end, text: ';' }]);
    }
    const declaration = [node, node.init, node.left].find((part) => declaredIn(part).includes(name));
    if (declaration) {
      const { start, kind } = declaration;
      const text = kind === 'var' ? 'let' : 'var'.padEnd(kind.length);
      return edited(code, [{ start, end: start + kind.length, text }]);
    }
  }
  return undefined;
}

/** The variables that a node declares, if it is a declaration of variables. */
function declaredIn(node) {
  return node?.type === 'VariableDeclaration' ? node.declarations.flatMap(({ id }) => names(id)) : [];
}

/** The variables of a pattern. */
function names(pattern) {
  switch (pattern?.type) {
    case 'Identifier':
      return [pattern.name];
    case 'ObjectPattern':
      return pattern.properties.flatMap((property) => names(property.value ?? property.argument));
    case 'ArrayPattern':
      return pattern.elements.flatMap(names);
    case 'AssignmentPattern':
      return names(pattern.left);
    case 'RestElement':
      return names(pattern.argument);
    default:
      return [];
  }
}

module.exports = { constants, redeclared };
