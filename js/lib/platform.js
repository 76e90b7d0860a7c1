// The little of Cloudflare's platform that the SDK cannot be loaded without: the module `cloudflare:workers`, and the
// endings of file names that their bundler adds and Node wants. Nothing else is changed for anybody's imports.
import { registerHooks } from "node:module";

const WORKERS = new URL("./workers.js", import.meta.url).href;

registerHooks({
  resolve(name, context, next) {
    if (name === "cloudflare:workers") return { url: WORKERS, shortCircuit: true };
    const theirs = name.startsWith(".") && context.parentURL?.includes("/@cloudflare/containers/");
    return next(theirs && !name.endsWith(".js") ? `${name}.js` : name, context);
  },
});
