'use strict';

const { AsyncLocalStorage } = require('node:async_hooks');
const { Session } = require('node:inspector');

const { onBefore, onInit } = require('./internals.cjs');

const { then } = Promise.prototype;
const { apply } = Reflect;
const { setTimeout } = globalThis; // the user may put a clock of their own there

/** Where V8's REPL mode puts the value of a script that has run. */
const VALUE = '.repl_result';

/** Milliseconds for which an abandoned script is looked out for; promises cost more meanwhile. */
const LOOKOUT = 5_000;

/** On whose behalf asynchronous code runs. */
const owners = new AsyncLocalStorage();

const session = new Session();
session.connect();

/**
 * Why a script does not compile; lines from 1, columns from 0.
 * @typedef {{name: string, message: string, line: number, column: number}} Flaw
 */

/**
 * What became of a script.
 * @typedef {object} Ending
 * @property {(value: unknown) => void} value - it ran to its end
 * @property {(error: unknown) => void} thrown
 * @property {(flaw: Flaw) => void} refused - it does not compile; nothing has run
 * @property {(message: string) => void} terminated
 */

/**
 * Runs a script in V8's REPL mode: declarations last and may be repeated, `await` works, the last expression is the
 * value. It is taken from the script's own promise (the first one made), because the inspector would answer with a
 * copy: half a gigabyte of text takes it ten seconds and four gigabytes.
 * @param {string} source
 * @param {Ending} ending - exactly one of its functions is called, unless the script never ends
 * @param {number} owner - what `abandon` will call it by
 */
function evaluate(source, ending, owner) {
  let promise;
  let settled = false;
  const stop = onInit((made) => {
    if (promise) return;
    promise = made;
    stop();
    const value = (box) => {
      settled = true;
      const result = box[VALUE];
      box[VALUE] = undefined;
      ending.value(result);
    };
    const thrown = (error) => {
      settled = true;
      ending.thrown(error);
    };
    apply(then, made, [value, thrown]);
  });
  // The session keeps this function until it is called, and thereby the promise. When the inspector finds the
  // promise of a script collected that has not ended, it answers from within the garbage collector, which is fatal.
  const answered = (failure, answer) => {
    if (!promise) stop(); // before anything else is evaluated
    if (failure) ending.terminated(failure.message);
    else if (!settled) ending.refused(flawOf(answer.exceptionDetails));
  };
  const parameters = { expression: source, replMode: true, silent: true };
  owners.run(owner, () => session.post('Runtime.evaluate', parameters, answered));
}

function flawOf({ exception, lineNumber, columnNumber }) {
  const [, name, message] = /^(\w+)(?:: (.*))?/.exec(exception.description);
  return { name, message: message ?? '', line: lineNumber + 1, column: columnNumber };
}

/** Ends what JavaScript is running on this thread. */
function terminate() {
  session.post('Runtime.terminateExecution');
}

/**
 * Ends what a script left waiting, if it goes on soon: a loop that polls must not live through an interrupt.
 * Ending it drops all promise jobs that are due, so it happens only when `mayEnd`. Timers and servers stay; what their
 * callbacks await within that time does not.
 * @param {number} owner - as given to `evaluate`
 * @param {() => boolean} mayEnd
 */
function abandon(owner, mayEnd) {
  const stop = onBefore(() => {
    if (owners.getStore() === owner && mayEnd()) terminate();
  });
  setTimeout(stop, LOOKOUT).unref();
}

module.exports = { abandon, evaluate, terminate };
