'use strict';

const path = require('node:path');
const { inspect, types } = require('node:util');

const { decorateErrorStack, shapeStacks } = require('./internals.cjs');
const { textOf } = require('./results.cjs');

const HERE = __dirname + path.sep;
const EVALUATION = path.join(__dirname, 'evaluation.cjs');
const MESSAGE_LIMIT = 100_000;
const LINES = 1_000;

/** A frame that says nothing about the user's code. */
const FOREIGN = /^\s+at (?:.*\()?node:(?:internal\/|inspector:|diagnostics_channel:)/;

/** Where an error arose that has no frame in the user's code. */
const places = new WeakMap();

/** Source maps of the cells whose lines a compiler moved. */
const maps = new Map();

/**
 * What is sent about an error.
 * @typedef {{name: string, message: string, traceback: string[], line: number | null}} Description
 */

/** The name that stands for a cell in stacks. V8 takes no blanks in it. */
function cellName(run) {
  return `<cell-${run}>`;
}

/** Has every stack show the user's frames only, at the lines the user wrote. */
function shapeUserStacks() {
  shapeStacks(
    (frames) => {
      const base = frames.findIndex((frame) => frame.getFileName() === EVALUATION);
      if (base >= 0) frames = frames.slice(0, base);
      return frames.filter((frame) => !isOurs(frame.getFileName()));
    },
    (stack) => (maps.size ? stack.replace(/<cell-(\d+)>:(\d+):(\d+)/g, original) : stack),
  );
}

function isOurs(file) {
  return typeof file === 'string' && (file.startsWith(HERE) || file === 'node:inspector');
}

function original(place, run, line, column) {
  const entry = maps.get(Number(run))?.findEntry(line - 1, column - 1);
  if (entry?.originalLine === undefined) return place;
  return `${cellName(run)}:${entry.originalLine + 1}:${entry.originalColumn + 1}`;
}

/** Tells how the lines of a compiled cell correspond to what the user wrote. */
function mapCell(run, map) {
  maps.set(run, map);
}

/** Remembers the line that `trace` (a stack) was taken at as the place of `error`. */
function placeError(error, trace) {
  if (typeof error === 'object' && error !== null && !places.has(error)) places.set(error, trace);
}

/**
 * @param {unknown} error - anything can be thrown
 * @param {number} run - the cell whose line is wanted
 * @returns {Description}
 */
function describe(error, run) {
  if (!isError(error)) {
    const message = shorten(typeof error === 'string' ? error : textOf(error));
    return { name: 'Error', message, traceback: [`Uncaught ${message}`], line: null };
  }
  const traceback = tracebackOf(error);
  return {
    name: nameOf(error),
    message: shorten(attempt(() => String(error.message), '')),
    traceback,
    line: lineIn(attempt(() => String(error.stack), ''), run) ?? lineIn(places.get(error) ?? '', run),
  };
}

/** A script that does not compile, shown as Node shows it. */
function describeFlaw({ name, message, line, column }, run, code) {
  const source = code.split('\n', line)[line - 1];
  const shown = source === undefined || source.length > 500 ? [] : [source, `${' '.repeat(column)}^`, ''];
  return { name, message, traceback: [`${cellName(run)}:${line}`, ...shown, `${name}: ${message}`], line };
}

function isError(value) {
  return types.isNativeError(value) || attempt(() => value instanceof Error, false);
}

/** The name it was given, else that of its class: most classes of errors do not set one. */
function nameOf(error) {
  const given = attempt(() => (Object.hasOwn(error, 'name') || error instanceof DOMException ? error.name : ''), '');
  const name = given || attempt(() => error.constructor.name, '') || attempt(() => error.name, '');
  return typeof name === 'string' && name ? name.toWellFormed() : 'Error';
}

/** The lines of an error as Node shows them, causes and properties too, without frames of Node and of ours. */
function tracebackOf(error) {
  attempt(() => decorateErrorStack(error)); // a file that does not compile: with its line
  const text = attempt(() => inspect(error), undefined) ?? textOf(error);
  const lines = [];
  for (const line of shorten(text).split('\n', LINES)) {
    if (!FOREIGN.test(line)) lines.push(line);
    else if (line.endsWith(' {')) lines.push(`${lines.pop()} {`); // properties follow the last frame
  }
  return lines;
}

function lineIn(stack, run) {
  const place = new RegExp(`${cellName(run)}:(\\d+):\\d+`).exec(stack);
  return place && Number(place[1]);
}

function shorten(text) {
  const more = text.length - MESSAGE_LIMIT;
  return more > 0 ? `${text.slice(0, MESSAGE_LIMIT)}… (${more} more characters)` : text;
}

/** What `look` finds, or `otherwise` where the user's object does not let itself be looked at. */
function attempt(look, otherwise) {
  try {
    return look();
  } catch {
    return otherwise;
  }
}

/** Writes errors of what the user left running to stderr; the context lives on. */
function reportBackgroundErrors() {
  process.on('uncaughtException', (error) => {
    if (process.listenerCount('uncaughtException') > 1) return; // the user's own listener deals with it
    const lines = isError(error) ? tracebackOf(error) : [textOf(error)];
    process.stderr.write(`Uncaught ${lines.join('\n')}\n`);
  });
}

module.exports = { cellName, describe, describeFlaw, mapCell, placeError, reportBackgroundErrors, shapeUserStacks };
