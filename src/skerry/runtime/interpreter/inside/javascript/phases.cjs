'use strict';

/**
 * How the thread that runs code and the one that watches for interrupts agree, in shared memory.
 *
 * A word holds the number of the run and its phase. The watcher asks V8 for a termination only after changing OPEN to
 * DOOMED, and the other thread leaves OPEN only by changing it likewise. So a termination never hits the next run, nor
 * half a message.
 */

/** The index of that word, and of the number of a run that was to be terminated while it was closed. */
const STATE = 0;
const ASKED = 1;

const IDLE = 0;
const CLOSED = 0; // something is being sent
const OPEN = 1;
const DOOMED = 2; // V8 has been asked
const TERMINATED = 3; // and has done it

const PHASES = 4;

const stateOf = (run, phase) => run * PHASES + phase;
const runOf = (state) => Math.floor(state / PHASES);
const phaseOf = (state) => state % PHASES;

module.exports = { ASKED, CLOSED, DOOMED, IDLE, OPEN, STATE, TERMINATED, phaseOf, runOf, stateOf };
