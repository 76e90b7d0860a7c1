'use strict';

const { cellName, mapCell } = require('./errors.cjs');

/** Code longer than this (generated, say) is not parsed for the sake of its constants. */
const CONSTANTS_LIMIT = 2_000_000;

const REDECLARATIONS = 100;

/** Loaded when needed. */
const rewriting = () => require('./rewriting.cjs');

/** Code that does not compile, and what is wrong with it. */
class Flawed extends Error {
  constructor(flaw) {
    super(flaw.message);
    this.flaw = flaw;
  }
}

/** The code of a cell, on its way to a script that V8 takes. Lines stay where they are. */
class Source {
  #code;
  #cell;
  #language;
  #script;
  #bracketed;
  #attempts = 0;

  constructor(code, cell, language) {
    this.#code = code;
    this.#cell = cell;
    this.#language = language;
    // An object literal is taken for a block unless it stands in brackets.
    this.#bracketed = /^\s*\{/.test(code) && !/;\s*$/.test(code);
  }

  /**
   * The script to try first.
   * @throws {Flawed}
   */
  first() {
    if (this.#bracketed) {
      try {
        return this.#compile(`(${this.#code}\n)`);
      } catch {
        this.#bracketed = false; // a block after all, or the compiler tells what is wrong with it
      }
    }
    return this.#compile(this.#code);
  }

  /**
   * The script to try after V8 found a flaw in the last one.
   * @throws {Flawed} if there is none left
   */
  next(flaw) {
    if (this.#bracketed) {
      this.#bracketed = false;
      return this.#compile(this.#code);
    }
    const [, name] = /^Identifier '(.+)' has already been declared$/.exec(flaw.message) ?? [];
    const script = name && ++this.#attempts <= REDECLARATIONS && rewriting().redeclared(this.#script, name);
    if (script) return (this.#script = script);
    // V8 only says that a script cannot import: what is wrong with it as a module?
    throw new Flawed((/\b(?:import|export)\b/.test(flaw.message) && rewriting().moduleFlaw(this.#code)) || flaw);
  }

  #compile(code) {
    if (this.#language === 'typescript') {
      const { code: compiled, map, flaw } = require('./typescript.cjs').compile(code);
      if (flaw) throw new Flawed(flaw);
      if (map) mapCell(this.#cell, map);
      code = compiled;
    }
    if (mayNeedRewriting(code)) code = rewriting().rewritten(code);
    return (this.#script = `${code}\n//# sourceURL=${cellName(this.#cell)}`);
  }
}

/** All else goes to V8 without being parsed twice. */
function mayNeedRewriting(code) {
  return /\b(?:import|export)\b/.test(code) || (code.length < CONSTANTS_LIMIT && /\bconst\b/.test(code));
}

module.exports = { Flawed, Source };
