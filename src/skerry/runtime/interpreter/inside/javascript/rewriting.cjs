'use strict';

const { constants, redeclared } = require('./declarations.cjs');
const { hasModuleSyntax, moduleEdits } = require('./imports.cjs');
const { edited, parse } = require('./parsing.cjs');

/** The code as V8's REPL mode takes it. Code that does not parse is given back as it is, for V8 to say why. */
function rewritten(code) {
  const isModule = hasModuleSyntax(code);
  const { program } = attempt(code, isModule ? 'module' : 'script');
  if (!program) return code;
  return edited(code, [...(isModule ? moduleEdits(program, code) : []), ...constants(program)]);
}

/** What is wrong with the code as a module, if anything. */
function moduleFlaw(code) {
  return attempt(code, 'module').flaw;
}

function attempt(code, sourceType) {
  try {
    return { program: parse(code, sourceType) };
  } catch ({ name, message, loc }) {
    const { line = 1, column = 0 } = loc ?? {};
    return { flaw: { name, message: message.replace(/ \(\d+:\d+\)$/, ''), line, column } };
  }
}

/** Loads the parser. */
function warmUp() {
  rewritten('const warm = 1');
}

module.exports = {
  moduleFlaw,
  /** The script with `name` declared as another kind; undefined if it cannot be. */
  redeclared: (script, name) => {
    const { program } = attempt(script, 'script');
    return program && redeclared(program, script, name);
  },
  rewritten,
  warmUp,
};
