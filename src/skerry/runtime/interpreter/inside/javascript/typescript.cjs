'use strict';

const { SourceMap } = require('node:module');

const internals = require('./internals.cjs');

/**
 * JavaScript from TypeScript. Types become blanks, so that every position stays; what is more than types (enum,
 * namespace, parameter properties) is compiled, and `map` tells the positions.
 * @param {string} code
 * @returns {{code?: string, map?: SourceMap, flaw?: import('./evaluation.cjs').Flaw}}
 */
function compile(code) {
  let { output, error } = transform(code, { mode: 'strip-only' });
  if (error?.code === 'UnsupportedSyntax') {
    ({ output, error } = transform(code, { mode: 'transform', sourceMap: true }));
  }
  if (error) {
    const { message, startLine = 1, startColumn = 0 } = error;
    return { flaw: { name: 'SyntaxError', message, line: startLine, column: startColumn } };
  }
  return { code: output.code, map: output.map && new SourceMap(JSON.parse(output.map)) };
}

function transform(code, options) {
  try {
    return { output: internals.amaro.transformSync(code, { ...options, filename: '' }) };
  } catch (error) {
    return { error: typeof error === 'string' ? { message: error } : error };
  }
}

/** Loads the compiler, which takes longer than compiling. */
function warmUp() {
  compile('let warm: number');
}

module.exports = { compile, warmUp };
