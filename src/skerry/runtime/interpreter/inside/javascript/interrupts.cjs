'use strict';

const path = require('node:path');
const { Worker } = require('node:worker_threads');

const { terminate } = require('./evaluation.cjs');
const { clearAsyncIdStack } = require('./internals.cjs');
const { ASKED, CLOSED, DOOMED, IDLE, OPEN, STATE, TERMINATED, phaseOf, stateOf } = require('./phases.cjs');

const PATIENCE = 1_000;

/** Lets a watcher on a thread of its own end what this thread runs (phases.cjs says how the two agree). */
class Interrupts {
  #shared = new Int32Array(new SharedArrayBuffer(8));
  #interrupted;
  #watcher;

  /** @param {(run: number) => void} interrupted - called when `run` is to end, and when it has been terminated */
  constructor(interrupted) {
    this.#interrupted = interrupted;
  }

  /** Starts the watcher, if that has not happened. */
  watch() {
    if (this.#watcher) return;
    this.#watcher = new Worker(path.join(__dirname, 'watcher.cjs'), {
      workerData: this.#shared,
      env: {},
      execArgv: ['--expose-internals'],
      resourceLimits: { maxYoungGenerationSizeMb: 1, maxOldGenerationSizeMb: 16, codeRangeSizeMb: 4 },
    });
    this.#watcher.on('message', (run) => {
      // A terminated callback has left its mark on the stack of asynchronous ids.
      if (this.struck) clearAsyncIdStack();
      this.#interrupted(run);
    });
    this.#watcher.unref();
  }

  /** Whether what runs was terminated, or is about to be. */
  get struck() {
    return phaseOf(Atomics.load(this.#shared, STATE)) >= DOOMED;
  }

  /** From here on `run` can be interrupted. */
  begin(run) {
    this.watch();
    Atomics.store(this.#shared, STATE, stateOf(run, OPEN));
  }

  /** From here on it cannot. True if it was interrupted before. */
  end(run) {
    return this.#leave(run, IDLE);
  }

  /** Takes note that what ran was terminated; false if that was none of the watcher's doing. */
  acknowledge(run) {
    if (!this.struck) return false;
    Atomics.store(this.#shared, STATE, stateOf(run, TERMINATED));
    return true;
  }

  /** Does what must not be cut in half. */
  shield(run, action) {
    this.#leave(run, stateOf(run, CLOSED));
    action();
    Atomics.store(this.#shared, STATE, stateOf(run, OPEN));
    if (Atomics.load(this.#shared, ASKED) === run) {
      Atomics.store(this.#shared, STATE, stateOf(run, TERMINATED));
      terminate();
    }
  }

  /** Leaves OPEN. If the termination is on its way, it comes here: it ends this function, or only lets it go on. */
  #leave(run, next) {
    if (Atomics.compareExchange(this.#shared, STATE, stateOf(run, OPEN), next) === stateOf(run, OPEN)) return false;
    const end = performance.now() + PATIENCE;
    while (Atomics.load(this.#shared, STATE) === stateOf(run, DOOMED) && performance.now() < end);
    Atomics.store(this.#shared, STATE, next);
    return true;
  }
}

module.exports = { Interrupts };
