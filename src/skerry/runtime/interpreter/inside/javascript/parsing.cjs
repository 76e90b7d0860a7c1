'use strict';

const internals = require('./internals.cjs');

/**
 * A change of the source text.
 * @typedef {{start: number, end: number, text: string}} Edit
 */

/**
 * @param {string} code
 * @param {'module' | 'script'} sourceType
 * @throws {SyntaxError} with `loc`
 */
function parse(code, sourceType) {
  const options = { ecmaVersion: 'latest', sourceType, allowAwaitOutsideFunction: true, allowHashBang: true };
  return internals.acorn.parse(code, options);
}

/** The code with the edits made, and as many lines as before. */
function edited(code, edits) {
  edits.sort((a, b) => a.start - b.start || a.end - b.end);
  let result = '';
  let position = 0;
  for (const { start, end, text } of edits) {
    if (start < position) continue; // inside what another edit replaced
    result += code.slice(position, start) + text + code.slice(start, end).replace(/[^\n]+/g, '');
    position = end;
  }
  return result + code.slice(position);
}

/** Calls the function named like the type of a node, for every node. */
function visit(program, visitors) {
  internals.acornWalk.simple(program, visitors);
}

module.exports = { edited, parse, visit };
