'use strict';

const { Console } = require('node:console');
const fs = require('node:fs');
const { Writable } = require('node:stream');

const { writeSync } = fs;
const pause = new Int32Array(new SharedArrayBuffer(4));

/**
 * Writes all of `bytes`, waiting as long as the reader needs.
 * @param {number} fd
 * @param {Uint8Array} bytes
 */
function writeFully(fd, bytes) {
  let written = 0;
  while (written < bytes.length) {
    try {
      written += writeSync(fd, bytes, written);
    } catch (error) {
      // A program that was given our descriptor can make the pipe non-blocking for us too.
      if (error.code !== 'EAGAIN') throw error;
      Atomics.wait(pause, 0, 0, 2);
    }
  }
}

/**
 * stdout or stderr: what is written has reached the pipe when `write` returns, and the pipe stays blocking for
 * subprocesses.
 *
 * Writing goes past the bookkeeping of streams: a termination in the middle of it would leave the stream waiting.
 */
class Output extends Writable {
  _type = 'pipe';
  _isStdio = true;

  #written = 0;

  constructor(fd) {
    super({ emitClose: false });
    this.fd = fd;
  }

  /** How many bytes have gone to it. */
  static written(stream) {
    return stream.#written;
  }

  write(chunk, encoding, callback) {
    if (typeof encoding === 'function') [encoding, callback] = [undefined, encoding];
    if (typeof chunk === 'string') chunk = Buffer.from(chunk, encoding);
    else if (!ArrayBuffer.isView(chunk)) return super.write(chunk, encoding, callback); // which says what is wrong
    this.#put(chunk);
    if (typeof callback === 'function') process.nextTick(callback);
    return true;
  }

  _write(chunk, encoding, callback) {
    this.#put(chunk);
    callback();
  }

  /** Like Node's own: stdout cannot be closed by accident. */
  _destroy(error, callback) {
    callback(error);
  }

  #put(bytes) {
    try {
      writeFully(this.fd, bytes);
      this.#written += bytes.length;
    } catch (error) {
      // Nobody reads any more: that is the end of the context, not an error of the code.
      if (error.code !== 'EPIPE') throw error;
    }
  }
}

let streams;

/** What was written to stdout and stderr so far, for the place of messages among it. */
const written = () => [Output.written(streams.stdout), Output.written(streams.stderr)];

/** Puts our streams in the place of Node's, which write late when a pipe is full and make it non-blocking. */
function takeOver() {
  streams = { stdout: new Output(1), stderr: new Output(2) };
  for (const [name, stream] of Object.entries(streams)) {
    Object.defineProperty(process, name, { configurable: true, enumerable: true, get: () => stream });
  }
  // Node's own console would hand every value to the inspector as well, which keeps the last thousand.
  const own = new Console({ ...streams, ignoreErrors: false });
  for (const name of Object.keys(own)) {
    if (typeof console[name] === 'function' && typeof own[name] === 'function') console[name] = own[name];
  }
}

module.exports = { takeOver, writeFully, written };
