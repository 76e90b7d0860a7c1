'use strict';

const { inspect, types } = require('node:util');

const { encode } = require('./frames.cjs');

const TEXT_LIMIT = 1_000_000;
const FORMAT_LIMIT = 16 * 1024 * 1024;

const { stringify } = JSON;
const { getPrototypeOf } = Object;
const plain = new Set([Object.prototype, Array.prototype, null]);

/** A value that JSON would not tell truly, or not within the limit. */
class Unfit extends Error {
  constructor(size) {
    super();
    this.size = size;
  }
}

/** One result: its formats as JSON text, and what was too large. */
class Result {
  #formats = [];
  #truncated = {};

  /** Adds text, cut at the limit. `length` is its full length where `text` is only the beginning. */
  text(text, length = text.length) {
    if (text.length > TEXT_LIMIT) text = cut(text);
    if (length > TEXT_LIMIT) this.#truncated.text = length;
    this.#formats.push(['text', stringify(text)]);
    return this;
  }

  /** Adds any other format, or notes how large it would have been. */
  format(name, value) {
    if (typeof value === 'string' && value.length > FORMAT_LIMIT) {
      this.#truncated[name] = value.length;
      return this;
    }
    return this.serialised(name, stringify(value));
  }

  serialised(name, json) {
    const size = json.length > FORMAT_LIMIT / 3 ? Buffer.byteLength(json) : json.length;
    if (size > FORMAT_LIMIT) this.#truncated[name] = size;
    else this.#formats.push([name, json]);
    return this;
  }

  /** Adds the value as JSON where that says all of it. */
  json(value) {
    let json;
    try {
      json = jsonOf(value);
    } catch (error) {
      // Cycles, getters and toJSON that throw: the text has to do.
      if (error instanceof Unfit && error.size) this.#truncated.json = error.size;
    }
    return json === undefined ? this : this.serialised('json', json);
  }

  toString() {
    const members = this.#formats.map(([name, json]) => `"${name}":${json}`);
    if (Object.keys(this.#truncated).length) members.push(`"truncated":${encode(this.#truncated)}`);
    return `{${members.join(',')}}`;
  }
}

/**
 * A value as a result: text as the REPL shows it, and JSON if it is an object.
 * Runs code of the user's where the value has some: getters, toJSON, inspect.custom.
 */
function resultOf(value) {
  const result = new Result();
  if (typeof value === 'string') {
    const whole = value.length <= TEXT_LIMIT;
    const shown = inspect(whole ? value : cut(value), { maxStringLength: null, breakLength: Infinity });
    return result.text(shown, whole ? shown.length : value.length);
  }
  result.text(textOf(value));
  return typeof value === 'object' && value !== null ? result.json(value) : result;
}

/** A value as the REPL shows it, whatever its own code does. */
function textOf(value) {
  try {
    return inspect(value, { showProxy: true });
  } catch (error) {
    return `<cannot be shown: ${messageOf(error)}>`;
  }
}

function messageOf(error) {
  try {
    return String(error);
  } catch {
    return 'its error cannot be shown either';
  }
}

/** @returns {string | undefined} undefined for a value that is nothing in JSON */
function jsonOf(value) {
  let size = 0;
  return stringify(value, (key, member) => {
    // What is counted is less than what will be written, so that nothing is refused that fits.
    size += 2;
    switch (typeof member) {
      case 'string':
        size += member.length;
        break;
      case 'function':
      case 'symbol':
      case 'bigint':
        throw new Unfit();
      case 'object':
        if (member !== null && !plain.has(getPrototypeOf(member)) && isOpaque(member)) throw new Unfit();
    }
    if (size > FORMAT_LIMIT) throw new Unfit(size);
    return member;
  });
}

/** Whether JSON would show nothing of what is in it. */
function isOpaque(value) {
  return (
    types.isMap(value) ||
    types.isSet(value) ||
    types.isWeakMap(value) ||
    types.isWeakSet(value) ||
    types.isPromise(value) ||
    types.isRegExp(value) ||
    types.isNativeError(value) ||
    types.isAnyArrayBuffer(value) ||
    types.isArrayBufferView(value)
  );
}

/** The beginning of a text that is too long, never half a character. */
function cut(text) {
  const end = (text.charCodeAt(TEXT_LIMIT - 1) & 0xfc00) === 0xd800 ? TEXT_LIMIT - 1 : TEXT_LIMIT;
  return text.slice(0, end);
}

module.exports = { Result, resultOf, textOf };
