// Options that the SDK has, and does not send: the signal of a command; of code its time, its variables and its signal; of a
// context the time that its code has.
import { AsyncLocalStorage } from "node:async_hooks";

const wishes = new AsyncLocalStorage();
const COMMAND = "/api/execute";
const CODE = "/api/execute/code";
const CONTEXTS = "/api/contexts";

/** Does something for which these options hold. */
export function wishing({ signal, timeout, envVars } = {}, work) {
  if (signal?.aborted) throw new Error("Operation was aborted");
  return wishes.run({ signal, timeout, envVars }, work);
}

/** A request of the SDK's client, with what it left out. */
export function completed(path, { method, body, signal }) {
  const wished = [COMMAND, CODE, CONTEXTS].includes(path) ? wishes.getStore() : undefined;
  if (!wished) return { method, body, signal };
  const { timeout, envVars } = wished;
  if (path !== COMMAND && typeof body === "string" && (timeout !== undefined || envVars !== undefined)) {
    const more = path === CODE ? { timeout_ms: timeout, env_vars: envVars } : { timeout };
    body = JSON.stringify({ ...JSON.parse(body), ...more });
  }
  const signals = [signal, wished.signal].filter(Boolean);
  return { method, body, signal: signals.length > 1 ? AbortSignal.any(signals) : signals[0] };
}

/** Whatever runs code, a sandbox or one of its sessions, has it from here. */
export function carryWishes({ CodeInterpreter }) {
  for (const name of ["runCode", "runCodeStream"]) {
    const theirs = CodeInterpreter.prototype[name];
    CodeInterpreter.prototype[name] = async function (code, options) {
      return wishing(options, () => theirs.call(this, code, options));
    };
  }
  const create = CodeInterpreter.prototype.createCodeContext;
  CodeInterpreter.prototype.createCodeContext = async function (options) {
    return wishing({ timeout: options?.timeout }, () => create.call(this, options));
  };
}
