'use strict';

const { Result, resultOf } = require('./results.cjs');

/**
 * The global `display`: `display(value)`, and one function for each format that no value has by itself.
 * @param {(result: Result) => boolean} show - whether there was a run to show it for
 */
function makeDisplay(show) {
  const display = (value) => {
    if (!show(resultOf(value))) console.log(value);
  };
  for (const name of ['html', 'markdown', 'svg', 'latex', 'javascript', 'text']) {
    display[name] = (content) => {
      const text = String(content);
      const result = new Result();
      if (!show(name === 'text' ? result.text(text) : result.format(name, text))) console.log(text);
    };
  }
  for (const name of ['png', 'jpeg', 'pdf']) {
    display[name] = (content) => {
      const base64 = typeof content === 'string' ? content : bytes(content).toString('base64');
      show(new Result().format(name, base64));
    };
  }
  display.json = (value) => {
    if (!show(new Result().json(value))) console.log(value);
  };
  return display;
}

function bytes(content) {
  return ArrayBuffer.isView(content)
    ? Buffer.from(content.buffer, content.byteOffset, content.byteLength)
    : Buffer.from(content);
}

module.exports = { makeDisplay };
