// `wrangler dev` on a Worker's project that knows nothing of Skerry.
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { test } from "node:test";

const bin = (name) => new URL(`./node_modules/.bin/${name}`, import.meta.url).pathname;
const project = new URL("./project", import.meta.url).pathname;

test("a Worker's project runs with wrangler dev, and no Docker", { timeout: 60_000 }, async (t) => {
  const line = [bin("wrangler"), "dev", "--port", "0", "--ip", "127.0.0.1", "--log-level", "log"];
  const env = { ...process.env, CI: "1", WRANGLER_SEND_METRICS: "false" };
  const running = spawn(bin("skerry-engine"), line, { cwd: project, env, stdio: ["ignore", "pipe", "pipe"] });
  const ended = new Promise((resolve) => running.on("exit", resolve));
  t.after(() => running.kill("SIGKILL"));
  let said = "";
  const url = await new Promise((resolve, reject) => {
    for (const stream of [running.stdout, running.stderr])
      stream.on("data", (chunk) => {
        const ready = /Ready on (http:\S+)/.exec((said += chunk));
        if (ready) resolve(ready[1]);
      });
    ended.then(() => reject(new Error(said)));
  });
  const { stdout } = await (await fetch(url)).json();
  assert.match(stdout, /^42 on workerd-[0-9a-f]{32}$/);
  assert.equal(await (await fetch(`${url}/destroy`)).json(), "destroyed");
  running.kill("SIGTERM");
  await ended;
});

test("what needs images of one's own is not pretended", async () => {
  const docker = spawn(process.execPath, [new URL("./node_modules/@skerry/sandbox/bin/docker.js", import.meta.url).pathname, "push", "x"]);
  assert.equal(await new Promise((resolve) => docker.on("exit", resolve)), 1);
});
