// What stands in for the module `cloudflare:workers` in Node.
export class DurableObject {
  constructor(ctx, env) {
    this.ctx = ctx;
    this.env = env;
  }
}

export class WorkerEntrypoint {
  constructor(ctx, env) {
    this.ctx = ctx;
    this.env = env;
  }
}

export class RpcTarget {}

export const env = {};

const span = { isTraced: false, setAttribute() {}, end() {} };

export const tracing = { enterSpan: (name, work, ...rest) => work(span, ...rest) };
