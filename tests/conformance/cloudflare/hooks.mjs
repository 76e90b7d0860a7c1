const WORKERS = `
export class DurableObject { constructor(ctx, env) { this.ctx = ctx; this.env = env; } }
export class WorkerEntrypoint { constructor(ctx, env) { this.ctx = ctx; this.env = env; } }
export class RpcTarget {}
export const env = {};
export const tracing = { enterSpan: (name, work, ...rest) => work({ setAttribute() {}, isTraced: false, end() {} }, ...rest) };
`;

export async function resolve(name, context, next) {
  if (name === "cloudflare:workers") return { url: "workers:stub", shortCircuit: true };
  try {
    return await next(name, context);
  } catch (error) {
    if (!name.startsWith(".")) throw error;
    for (const rest of [".js", "/index.js"]) {
      try {
        return await next(name + rest, context);
      } catch {
        continue;
      }
    }
    throw error;
  }
}

export async function load(url, context, next) {
  if (url === "workers:stub") return { format: "module", shortCircuit: true, source: WORKERS };
  return next(url, context);
}
