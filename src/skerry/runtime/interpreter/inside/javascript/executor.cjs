'use strict';

/**
 * Runs JavaScript or TypeScript for the server: `node FLAGS executor.cjs LANGUAGE [NODE]`, where the flags are
 * `--expose-internals --no-force-async-hooks-checks`, and for TypeScript also
 * `--experimental-transform-types --disable-warning=ExperimentalWarning` (enums in files that are imported).
 * Descriptors: 1 and 2 are the user's output, 3 brings requests, 4 takes replies, 5 brings interrupts.
 */

const REQUESTS = 3;
const REPLIES = 4;

const language = process.argv[2];
const { exit } = process;

// Started through a dynamic loader, Node takes the loader for itself, unless it is told what it is.
process.execPath = process.argv[3] ?? process.execPath;
process.argv = [process.execPath];
process.execArgv = [];

require('./output.cjs').takeOver();
const { reportBackgroundErrors, shapeUserStacks } = require('./errors.cjs');
const { FrameReader, send } = require('./frames.cjs');
const { Context } = require('./context.cjs');
const { readPipe } = require('./internals.cjs');

shapeUserStacks();
reportBackgroundErrors();
require('./globals.cjs').define(language);

const context = new Context(REPLIES, language);
const reader = new FrameReader((request) => (request.begin ? begin(request) : context.run(request)));

/** Makes a process that was started in advance the one of a context: its directory, and all of its variables. */
function begin({ cwd, env }) {
  try {
    process.chdir(cwd);
  } catch (error) {
    send(REPLIES, { type: 'failed', message: error.message });
    exit(1);
  }
  for (const name of Object.keys(process.env)) delete process.env[name];
  Object.assign(process.env, env);
  send(REPLIES, { type: 'begun' });
}

readPipe(REQUESTS, (chunk) => reader.push(chunk), () => exit(0));

send(REPLIES, { type: 'ready', pid: process.pid, version: process.versions.node });

setImmediate(() => context.warmUp());
