'use strict';

const { types } = require('node:util');

const { makeDisplay } = require('./display.cjs');
const { describe, describeFlaw } = require('./errors.cjs');
const { abandon, evaluate } = require('./evaluation.cjs');
const { send, sendText } = require('./frames.cjs');
const { variable } = require('./globals.cjs');
const { Interrupts } = require('./interrupts.cjs');
const { written } = require('./output.cjs');
const { resultOf } = require('./results.cjs');
const { Flawed, Source } = require('./source.cjs');

const { then } = Promise.prototype;
const { apply } = Reflect;

const INTERRUPTED = {
  name: 'Interrupted',
  message: 'The execution was interrupted.',
  traceback: ['Interrupted: The execution was interrupted.'],
  line: null,
};

/**
 * Runs cells, one after the other, and tells what came of them.
 *
 * Written with callbacks: a termination empties V8's queue of promise jobs, and must not take ours with it.
 */
class Context {
  #replies;
  #language;
  #interrupts;
  #count = 0;
  #run = null;
  #last;

  /**
   * @param {number} replies - descriptor
   * @param {string} language
   */
  constructor(replies, language) {
    this.#replies = replies;
    this.#language = language;
    this.#interrupts = new Interrupts((cell) => this.#interrupt(cell));
    variable('_', () => this.#last);
    variable('display', () => display);
    const display = makeDisplay((result) => this.#show(result));
  }

  /** Loads what most cells need, while there is nothing else to do. */
  warmUp() {
    this.#interrupts.watch();
    require('./rewriting.cjs').warmUp();
    if (this.#language === 'typescript') require('./typescript.cjs').warmUp();
  }

  /** Runs the code of a request; the next may come after `done` was sent. */
  run({ run: number, code, env = {} }) {
    const run = { number, code, cell: ++this.#count, restore: applyEnvironment(env) };
    this.#run = run;
    send(this.#replies, { type: 'started', run: number, at: written() });
    this.#interrupts.begin(run.cell);
    const source = new Source(code, run.cell, this.#language);
    this.#evaluate(run, source, () => source.first());
  }

  /** Ends that cell if it is the one that runs: it waits for something, or has just been terminated. */
  #interrupt(cell) {
    if (this.#run?.cell !== cell) return;
    abandon(cell, () => this.#run === null);
    this.#fail(this.#run, () => INTERRUPTED);
  }

  /** Evaluates the script that `prepare` gives. */
  #evaluate(run, source, prepare) {
    let script;
    try {
      script = prepare();
    } catch (error) {
      if (error instanceof Flawed) this.#fail(run, () => describeFlaw(error.flaw, run.cell, run.code));
      else this.#throw(run, error);
      return;
    }
    const ending = {
      value: (value) => this.#settle(run, value),
      thrown: (error) => this.#throw(run, error),
      refused: (flaw) => this.#evaluate(run, source, () => source.next(flaw)),
      terminated: (message) => {
        if (this.#interrupts.acknowledge(run.cell)) this.#fail(run, () => INTERRUPTED);
        else this.#throw(run, new Error(message));
      },
    };
    evaluate(script, ending, run.cell);
  }

  #settle(run, value) {
    if (this.#run !== run) return;
    if (types.isPromise(value)) {
      apply(then, value, [(settled) => this.#settle(run, settled), (error) => this.#throw(run, error)]);
      return;
    }
    this.#last = value;
    const result = value === undefined ? undefined : resultOf(value).toString();
    this.#finish(run, () => {
      if (result) this.#sendResult(run, true, result);
    });
  }

  #throw(run, error) {
    this.#fail(run, () => describe(error, run.cell));
  }

  #fail(run, description) {
    if (this.#run !== run) return;
    const error = description();
    this.#finish(run, () => this.#sendError(run, error));
  }

  /** Sends what is left to say. Everything of the user's has run by now, so no interrupt is due any more. */
  #finish(run, report) {
    const interrupted = this.#interrupts.end(run.cell);
    this.#run = null;
    run.restore();
    if (interrupted) this.#sendError(run, INTERRUPTED);
    else report();
    send(this.#replies, { type: 'done', run: run.number, count: run.cell });
  }

  #sendError(run, error) {
    send(this.#replies, { type: 'error', run: run.number, ...error });
  }

  #show(result) {
    const run = this.#run;
    if (!run) return false;
    const text = result.toString();
    if (text === '{}') return true;
    this.#interrupts.shield(run.cell, () => this.#sendResult(run, false, text));
    return true;
  }

  #sendResult({ number }, main, json) {
    sendText(this.#replies, `{"type":"result","run":${number},"main":${main},"at":[${written()}],"result":${json}}`);
  }
}

/** Sets variables, and gives the function that puts back what was there. */
function applyEnvironment(env) {
  const before = Object.keys(env).map((name) => [name, process.env[name]]);
  const set = ([name, value]) => {
    if (value === undefined || value === null) delete process.env[name];
    else process.env[name] = value;
  };
  Object.entries(env).forEach(set);
  return () => before.forEach(set);
}

module.exports = { Context };
