// The genuine ComputeSDK provider for Cloudflare in its remote mode, which speaks the bridge, against a running server.
import assert from "node:assert/strict";
import { request } from "node:http";
import { text } from "node:stream/consumers";
import { after, before, test } from "node:test";
import { setTimeout } from "node:timers/promises";
import { cloudflare } from "@computesdk/cloudflare";

const { URL: sandboxUrl, KEY: sandboxApiKey } = process.env;
const compute = cloudflare({ sandboxUrl, sandboxApiKey, envVars: { FROM: "config" } });
let sandbox;

before(async () => {
  sandbox = await compute.sandbox.create({ envs: { GREETING: "it's \"quoted\"" } });
});
after(() => sandbox.destroy());

test("a command has its output, its errors, its exit code and its environment", async () => {
  const done = await sandbox.runCommand("echo $FROM $GREETING $MINE; echo err >&2; exit 3", { env: { MINE: "2" } });
  assert.deepEqual([done.stdout, done.stderr, done.exitCode], ["config it's \"quoted\" 2\n", "err\n", 3]);
});
test("a directory, a time limit, the background", async () => {
  assert.equal((await sandbox.runCommand("mkdir -p sub; cd sub; pwd")).stdout, "/workspace/sub\n");
  assert.equal((await sandbox.runCommand("pwd", { cwd: "/workspace/sub" })).stdout, "/workspace/sub\n");
  assert.equal((await sandbox.runCommand("sleep 965", { timeout: 300 })).exitCode, 124);
  await sandbox.runCommand("sleep 964", { background: true });
  assert.equal((await sandbox.runCommand("pkill -fx 'sleep 964'")).exitCode, 0);
});
test("a directory outside of the workspace is refused, as the bridge does", async () => {
  const done = await sandbox.runCommand("pwd", { cwd: "/etc" });
  assert.equal(done.exitCode, 127);
  assert.match(done.stderr, /403/);
});
test("files", async () => {
  const { filesystem } = sandbox;
  await filesystem.mkdir("/workspace/a b");
  await filesystem.writeFile("/workspace/a b/ü.txt", "grüße\n");
  assert.equal(await filesystem.readFile("/workspace/a b/ü.txt"), "grüße\n");
  assert.equal(await filesystem.exists("/workspace/a b/ü.txt"), true);
  assert.ok((await filesystem.readdir("/workspace/a b")).some((entry) => entry.name === "ü.txt" && entry.type === "file"));
  await filesystem.remove("/workspace/a b");
  assert.equal(await filesystem.exists("/workspace/a b"), false);
  await assert.rejects(filesystem.readFile("/workspace/nope"), /404/);
});
test("a port has an address that answers", async () => {
  await sandbox.runCommand("mkdir -p www; echo served >www/index.html; python3 -m http.server -d www 8099", { background: true });
  const url = new URL(await sandbox.getUrl({ port: 8099 }));
  // Browsers and curl know that names below localhost are this machine; Node asks a name server.
  const get = () => new Promise((resolve, reject) => {
    const asked = request({ host: "127.0.0.1", port: url.port, path: url.pathname, headers: { host: url.host } });
    asked.on("response", async (answer) => resolve({ status: answer.statusCode, text: await text(answer) }));
    asked.on("error", reject).end();
  });
  let answer = await get();
  for (let left = 50; left && answer.status !== 200; left--) {
    await setTimeout(100);
    answer = await get();
  }
  assert.deepEqual(answer, { status: 200, text: "served\n" });
});
test("it is found again, told about, and destroyed", async () => {
  const other = await compute.sandbox.create();
  await other.filesystem.writeFile("/workspace/kept", "1");
  const again = await compute.sandbox.getById(other.sandboxId);
  assert.equal(await again.filesystem.readFile("/workspace/kept"), "1");
  assert.equal((await again.getInfo()).status, "running");
  await again.destroy();
  await assert.rejects(other.filesystem.readFile("/workspace/kept"), /404/);
  await other.destroy();
});
test("a wrong key is refused", async () => {
  const stranger = cloudflare({ sandboxUrl, sandboxApiKey: "another" });
  await assert.rejects(stranger.sandbox.create(), /401/);
});
