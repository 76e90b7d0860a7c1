// Errors that the SDK has no class for.

/** What the server answered to a request of its own API that failed. */
export class SkerryError extends Error {
  constructor(status, { code = "unknown", message = `The server answered ${status}.`, hint, details } = {}) {
    super(hint ? `${message} ${hint}` : message);
    this.name = "SkerryError";
    this.status = status;
    this.code = code;
    this.hint = hint;
    this.details = details;
  }
}

/** A method that has its meaning only inside a Worker. */
export class UnsupportedInNodeError extends Error {
  constructor(method, reason) {
    super(`${method} cannot be had outside a Worker: ${reason}`);
    this.name = "UnsupportedInNodeError";
    this.code = "UNSUPPORTED_IN_NODE";
    this.method = method;
  }
}
