'use strict';

const Module = require('node:module');
const path = require('node:path');
const { pathToFileURL } = require('node:url');

const { placeError } = require('./errors.cjs');
const { RUNTIME } = require('./imports.cjs');
const { importFrom } = require('./internals.cjs');

const { then } = Promise.prototype;
const { apply } = Reflect;

/** Old modules that complain when they are touched. */
const DEPRECATED = new Set(['punycode', 'sys']);

/**
 * Makes the names that a cell finds besides JavaScript's own.
 * @param {string} language
 */
function define(language) {
  const files = new Files(language);
  variable('require', () => files.require);
  variable('module', () => files.module);
  variable('exports', () => files.module.exports);
  variable('__dirname', () => process.cwd());
  variable('__filename', () => files.name);
  for (const name of Module.builtinModules) {
    if (!/^[a-z]\w*$/.test(name) || name in globalThis || DEPRECATED.has(name)) continue;
    variable(name, () => files.require(name));
  }
  Object.defineProperty(globalThis, RUNTIME, { value: runtime(language, files) });
  importFrom(
    () => pathToFileURL(process.cwd() + path.sep).href,
    (load) => {
      const { stack } = new Error();
      const loading = load();
      apply(then, loading, [undefined, (error) => placeError(error, stack)]);
      return loading;
    },
  );
}

/** The file that a cell appears to be in, always in the working directory. */
class Files {
  #extension;
  #module;
  #required = {};

  constructor(language) {
    this.#extension = language === 'typescript' ? 'ts' : 'js';
  }

  get name() {
    return path.join(process.cwd(), `cell.${this.#extension}`);
  }

  /** The main module: `require.main === module` holds. */
  get module() {
    if (!this.#module) {
      this.#module = new Module(this.name);
      this.#module.filename = this.name;
      this.#module.paths = Module._nodeModulePaths(process.cwd());
    }
    return this.#module;
  }

  get require() {
    const cwd = process.cwd();
    if (this.#required.cwd !== cwd) {
      process.mainModule = this.module;
      this.#required = { cwd, require: Module.createRequire(cwd + path.sep) };
    }
    return this.#required.require;
  }
}

/** A global that is looked up each time, until the user sets it; not listed, as Node's own are not. */
function variable(name, get) {
  Object.defineProperty(globalThis, name, {
    configurable: true,
    get,
    set(value) {
      Object.defineProperty(globalThis, name, { configurable: true, enumerable: true, writable: true, value });
    },
  });
}

/** What code rewritten by imports.cjs refers to. */
function runtime(language, files) {
  return {
    get meta() {
      const resolve = (specifier) => {
        const resolved = files.require.resolve(specifier);
        return path.isAbsolute(resolved) ? pathToFileURL(resolved).href : resolved;
      };
      return { dirname: process.cwd(), filename: files.name, url: pathToFileURL(files.name).href, main: true, resolve };
    },
    /** The module, if it has those names. In TypeScript a name may be that of a type, and such are gone. */
    exported(namespace, specifier, names) {
      const missing = language === 'typescript' ? undefined : names.find((name) => !(name in namespace));
      if (missing === undefined) return namespace;
      throw new SyntaxError(`The requested module '${specifier}' does not provide an export named '${missing}'`);
    },
  };
}

module.exports = { define, variable };
