'use strict';

/** The thread that waits for interrupts, since the other one may be busy. */

const fs = require('node:fs');
const { Session } = require('node:inspector');
const { parentPort, workerData: shared } = require('node:worker_threads');

const { readPipe } = require('./internals.cjs');
const { ASKED, DOOMED, OPEN, STATE, TERMINATED, runOf, stateOf } = require('./phases.cjs');

const INTERRUPTS = 5;
const GRACE = 50; // milliseconds in which a thread that only waits answers by itself
const STUCK = 200; // milliseconds after which it must be waiting for a subprocess
const SIGNALS = ['SIGINT', 'SIGTERM', 'SIGKILL'];

let interrupting = 0;

readPipe(INTERRUPTS, () => {
  const run = runOf(Atomics.load(shared, STATE));
  if (!run || run === interrupting) return;
  interrupting = run;
  parentPort.postMessage(run);
  setTimeout(force, GRACE, run);
});

/** Terminates the run if it is still there, as soon as it may be. */
function force(run) {
  if (runOf(Atomics.load(shared, STATE)) !== run) return;
  Atomics.store(shared, ASKED, run);
  const [open, doomed] = [stateOf(run, OPEN), stateOf(run, DOOMED)];
  if (Atomics.compareExchange(shared, STATE, open, doomed) === open) terminate(run);
  else setTimeout(force, GRACE, run);
}

function terminate(run) {
  // Connected only for this: a session that is there when the process exits makes it wait.
  const session = new Session();
  session.connectToMainThread();
  let attempts = 0;
  const stuck = setInterval(() => killSubprocess(SIGNALS[attempts++] ?? 'SIGKILL'), STUCK);
  session.post('Runtime.terminateExecution', () => {
    clearInterval(stuck);
    session.disconnect();
    Atomics.compareExchange(shared, STATE, stateOf(run, DOOMED), stateOf(run, TERMINATED));
    parentPort.postMessage(run);
  });
}

/** Signals the subprocess that the main thread waits for (as execSync does): its newest, as it has made none since. */
function killSubprocess(signal) {
  const newest = childrenOf(process.pid).pop();
  if (newest === undefined) return;
  for (const pid of withDescendants(newest)) {
    try {
      process.kill(pid, signal);
    } catch {
      // It has ended by itself.
    }
  }
}

function withDescendants(pid) {
  return [pid, ...childrenOf(pid).flatMap(withDescendants)];
}

/** The processes that the main thread of `pid` started, oldest first. */
function childrenOf(pid) {
  try {
    return fs.readFileSync(`/proc/${pid}/task/${pid}/children`, 'utf8').split(' ').filter(Boolean).map(Number);
  } catch {
    return [];
  }
}
