'use strict';

const { writeFully } = require('./output.cjs');

const HEADER = 4;
const { stringify, parse } = JSON;

/**
 * Sends one message, given as JSON text.
 * @param {number} fd
 * @param {string} text
 */
function sendText(fd, text) {
  // JSON escapes a surrogate only when it stands alone, and no UTF-8 can say it.
  if (text.includes('\\ud')) {
    text = text.replace(/\\(?:u(d[89a-f][0-9a-f]{2})|.)/g, (escape, surrogate) => (surrogate ? '\ufffd' : escape));
  }
  const size = Buffer.byteLength(text);
  const frame = Buffer.allocUnsafe(HEADER + size);
  frame.writeUInt32BE(size);
  frame.write(text, HEADER);
  writeFully(fd, frame);
}

/** Sends one message. */
function send(fd, message) {
  sendText(fd, encode(message));
}

/** JSON of our own messages, member by member: the user may have given all objects a `toJSON`. */
function encode(value) {
  if (typeof value !== 'object' || value === null) return stringify(value);
  if (Array.isArray(value)) return `[${value.map(encode).join(',')}]`;
  const members = Object.keys(value).map((name) => `${stringify(name)}:${encode(value[name])}`);
  return `{${members.join(',')}}`;
}

/** Takes bytes as they come and gives each complete message to `receive`. */
class FrameReader {
  #chunks = [];
  #size = 0;

  constructor(receive) {
    this.receive = receive;
  }

  push(chunk) {
    this.#chunks.push(chunk);
    this.#size += chunk.length;
    for (;;) {
      if (this.#size < HEADER) return;
      if (this.#chunks[0].length < HEADER) this.#chunks = [Buffer.concat(this.#chunks)];
      const end = HEADER + this.#chunks[0].readUInt32BE();
      if (this.#size < end) return;
      const bytes = this.#chunks.length === 1 ? this.#chunks[0] : Buffer.concat(this.#chunks);
      this.#size -= end;
      this.#chunks = this.#size ? [bytes.subarray(end)] : [];
      this.receive(parse(bytes.toString('utf8', HEADER, end)));
    }
  }
}

module.exports = { FrameReader, encode, send, sendText };
