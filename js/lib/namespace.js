// Where sandboxes are found by name: what a Worker has as `env.Sandbox`.
import { UnsupportedInNodeError } from "./errors.js";
import { ObjectState } from "./objects.js";
import { Server } from "./server.js";
import { Sandbox } from "./sandbox.js";

/** The sandboxes of one server, and the class that they are of. */
export class Namespace {
  #server;
  #class;
  #env;
  #stubs = new Map();

  constructor({ url, apiKey = process.env.SKERRY_API_KEY, env = process.env, class: kind = Sandbox }) {
    if (!(kind === Sandbox || kind?.prototype instanceof Sandbox))
      throw new TypeError("The class of sandboxes has to extend the Sandbox of @skerry/sandbox.");
    const answering = ["outbound", "outboundByHost", "outboundHandlers"].find((name) => kind[name] !== undefined);
    if (answering)
      throw new UnsupportedInNodeError(`static ${answering}`, "requests of a sandbox are answered by Skerry's proxy, not by this program.");
    this.#server = new Server(url, apiKey);
    this.#class = kind;
    this.#env = env;
  }

  idFromName(name) {
    return { name, toString: () => name };
  }

  idFromString(name) {
    return this.idFromName(name);
  }

  get({ name }) {
    let stub = this.#stubs.get(name);
    if (!stub) this.#stubs.set(name, (stub = this.#open(name)));
    return stub;
  }

  getByName(name) {
    return this.get(this.idFromName(name));
  }

  #open(name) {
    const state = new ObjectState(name);
    const object = quietly(() => new this.#class(state, this.#env));
    object.attach(this.#server);
    return stub(object, state);
  }
}

/** The object as others see it: every method waits for what was settled before, as a Durable Object's gate makes it. */
function stub(object, state) {
  let configured = Promise.resolve();
  const methods = new Map();
  return new Proxy(object, {
    get(target, name) {
      const value = target[name];
      if (typeof value !== "function" || name === "constructor") return value;
      let method = methods.get(name);
      if (!method) {
        const call = async (...args) => {
          await state.settled();
          return target[name](...args);
        };
        method = async (...args) => {
          if (name !== "configure") return configured.then(() => call(...args));
          const before = configured;
          const done = before.then(() => call(...args));
          configured = done.catch(() => {});
          return done;
        };
        methods.set(name, method);
      }
      return method;
    },
  });
}

/** The SDK's log is made for a dashboard, and says again what is thrown: here it is for those who set SANDBOX_LOG_LEVEL. */
function quietly(make) {
  if (process.env.SANDBOX_LOG_LEVEL) return make();
  process.env.SANDBOX_LOG_LEVEL = "error";
  try {
    const object = make();
    object.logger.minLevel = Infinity;
    return object;
  } finally {
    delete process.env.SANDBOX_LOG_LEVEL;
  }
}

const byAddress = new Map();
// One that is described by an object of its own lasts as long as that: getSandbox() in every request finds the same.
const byDescription = new WeakMap();

/** A namespace for whatever says where the server is. */
export function namespaceOf(where) {
  if (typeof where?.idFromName === "function") return where;
  if (typeof where?.Sandbox?.idFromName === "function") return where.Sandbox;
  if (typeof where === "string" || where instanceof URL) return found(byAddress, String(where), { url: where });
  if (where?.url) return found(byDescription, where, where);
  if (where?.SKERRY_URL) return found(byDescription, where, { url: where.SKERRY_URL, apiKey: where.SKERRY_API_KEY, env: where });
  throw new TypeError('Say where Skerry is: a URL such as "http://127.0.0.1:8787", { url, apiKey }, or an env with SKERRY_URL.');
}

function found(places, key, description) {
  if (!places.has(key)) places.set(key, new Namespace(description));
  return places.get(key);
}
