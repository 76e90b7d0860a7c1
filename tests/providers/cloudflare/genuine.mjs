// Cloudflare's own bridge, as npm has it, in plain Node; its containers are sandboxes of the server at URL.
import { createServer } from "node:http";
import { Readable } from "node:stream";
import { buffer } from "node:stream/consumers";
import { skerry } from "@skerry/sandbox";

const { bridge } = await import("@cloudflare/sandbox/bridge");
const { URL: url, KEY: key } = process.env;
// Its pool of warm containers is a Durable Object; ours names each container as the sandbox it is for.
const pool = {
  configure: async () => {},
  getContainer: async (id) => id,
  lookupContainer: async (id) => id,
  reportStopped: async () => {},
};
const env = {
  SANDBOX_API_KEY: key,
  Sandbox: skerry({ url, apiKey: key }),
  WarmPool: { idFromName: (name) => name, get: () => pool },
};
const worker = bridge({}, {});

const server = createServer(async (incoming, outgoing) => {
  const body = await buffer(incoming);
  const { method, headers } = incoming;
  const request = new Request(`http://bridge${incoming.url}`, { method, headers, body: body.length ? body : undefined });
  const answer = await worker.fetch(request, env, { waitUntil() {}, passThroughOnException() {} });
  outgoing.writeHead(answer.status, Object.fromEntries(answer.headers)).flushHeaders();
  if (!answer.body) return outgoing.end();
  Readable.fromWeb(answer.body).on("error", () => outgoing.destroy()).pipe(outgoing);
});
server.listen(0, "127.0.0.1", () => console.log(`READY http://127.0.0.1:${server.address().port}`));
