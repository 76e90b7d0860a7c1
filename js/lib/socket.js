// WebSockets as a Worker's fetch hands them over: in a response, and silent until they are accepted.

/** An answer that is a WebSocket. Node's own Response cannot have the status 101. */
export class UpgradeResponse extends Response {
  #socket;

  constructor(socket) {
    super(null);
    this.#socket = socket;
  }

  get status() {
    return 101;
  }

  get statusText() {
    return "Switching Protocols";
  }

  get ok() {
    return false;
  }

  get webSocket() {
    return this.#socket;
  }
}

/** A connection that is open, and keeps what arrives until `accept()`. */
export function connect(url, headers, protocols, signal) {
  return new Promise((resolve, reject) => {
    if (signal?.aborted) return reject(signal.reason);
    const socket = new WebSocket(url, { headers, protocols });
    socket.binaryType = "arraybuffer";
    const early = [];
    const keep = (event) => {
      event.stopImmediatePropagation();
      early.push(event.data);
    };
    socket.addEventListener("message", keep);
    socket.accept = () => {
      // Whoever accepts adds listeners in the same breath, some before and some after.
      setImmediate(() => {
        socket.removeEventListener("message", keep);
        for (const data of early.splice(0)) socket.dispatchEvent(new MessageEvent("message", { data }));
      });
    };
    const given_up = () => {
      socket.close();
      reject(signal.reason);
    };
    const refused = () => {
      signal?.removeEventListener("abort", given_up);
      reject(new Error("The server refused the WebSocket."));
    };
    signal?.addEventListener("abort", given_up, { once: true });
    socket.addEventListener("error", refused, { once: true });
    socket.addEventListener("close", refused, { once: true });
    socket.addEventListener(
      "open",
      () => {
        for (const kind of ["error", "close"]) socket.removeEventListener(kind, refused);
        signal?.removeEventListener("abort", given_up);
        resolve(socket);
      },
      { once: true },
    );
  });
}
