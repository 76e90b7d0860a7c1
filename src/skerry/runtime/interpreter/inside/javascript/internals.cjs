'use strict';

/**
 * What is taken from Node's own insides (`--expose-internals`), all of it here: a new version of Node is checked
 * against this file.
 */

const { emitWarning } = process;
process.emitWarning = () => {}; // the binding announces itself as an aid for tests
const { internalBinding } = require('internal/test/binding');
process.emitWarning = emitWarning;

const { clearAsyncIdStack } = require('internal/async_hooks');
const { prepareStackTraceCallback } = require('internal/errors');
const { normalizeReferrerURL } = require('internal/modules/helpers');
const { onBefore, onInit } = require('internal/promise_hooks');
const { decorateErrorStack } = require('internal/util');

const symbols = internalBinding('symbols');

/**
 * Has `import()` in code that came from no file (cells, and what they evaluate) resolved as if written in `parent()`.
 * Node refuses it there; files and modules are served as Node does.
 * @param {() => string} parent - gives a URL
 * @param {(load: () => Promise<object>) => Promise<object>} perform - does each import of such code
 */
function importFrom(parent, perform) {
  const { getOrInitializeCascadedLoader } = require('internal/modules/esm/loader');
  internalBinding('module_wrap').setImportModuleDynamicallyCallback((referrer, specifier, phase, attributes, name) => {
    const load = async (from) => getOrInitializeCascadedLoader().import(specifier, from, attributes, phase);
    switch (referrer) {
      case symbols.source_text_module_default_hdo:
        return load(name);
      case symbols.vm_dynamic_import_default_internal:
      case symbols.vm_dynamic_import_main_context_default:
        return load(normalizeReferrerURL(name));
      default:
        return perform(() => load(parent()));
    }
  });
}

/**
 * Reads a pipe without the streams of `net`: they take as long to load as all of ours, and a termination could leave
 * one in the middle of its bookkeeping.
 * @param {number} fd
 * @param {(chunk: Buffer) => void} received
 * @param {() => void} [ended]
 */
function readPipe(fd, received, ended = () => {}) {
  const { Pipe, constants } = internalBinding('pipe_wrap');
  const { kReadBytesOrError, streamBaseState } = internalBinding('stream_wrap');
  const pipe = new Pipe(constants.SOCKET);
  pipe.open(fd);
  pipe.onread = (bytes) => {
    const count = streamBaseState[kReadBytesOrError];
    if (count > 0) {
      received(Buffer.from(bytes, 0, count));
    } else if (count < 0) {
      pipe.close();
      ended();
    }
  };
  pipe.readStart();
}

/**
 * Has every stack made from what `select` leaves of its frames, and its text passed through `edit`.
 * @param {(frames: NodeJS.CallSite[]) => NodeJS.CallSite[]} select
 * @param {(stack: string) => string} edit
 */
function shapeStacks(select, edit) {
  internalBinding('errors').setPrepareStackTraceCallback((realm, error, frames) => {
    const stack = prepareStackTraceCallback(realm, error, select(frames));
    return typeof stack === 'string' ? edit(stack) : stack;
  });
}

module.exports = {
  clearAsyncIdStack,
  decorateErrorStack,
  importFrom,
  onBefore,
  onInit,
  readPipe,
  shapeStacks,
  /** The parser Node carries for its REPL. */
  get acorn() {
    return require('internal/deps/acorn/acorn/dist/acorn');
  },
  get acornWalk() {
    return require('internal/deps/acorn/acorn-walk/dist/walk');
  },
  /** The compiler Node strips types with, without the warning that its public face gives. */
  get amaro() {
    return require('internal/deps/amaro/dist/index');
  },
};
