// The RPC transport, spoken by the genuine Cap'n Web of the client's own dependencies.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { newWebSocketRpcSession } from "capnweb";
import { parseSSEStream } from "@cloudflare/sandbox";

const api = newWebSocketRpcSession(process.env.BASE.replace(/^http/, "ws") + "/rpc");
const S = "rpc";

async function all(stream) {
  const events = [];
  for await (const event of parseSSEStream(stream)) events.push(event);
  return events;
}

async function bytes(stream) {
  const chunks = [];
  for await (const chunk of stream) chunks.push(Buffer.from(chunk));
  return Buffer.concat(chunks);
}

before(async () => {
  const made = await api.utils.createSession({ id: S, env: { A: "1" }, cwd: "/workspace" });
  assert.deepEqual([made.success, made.id, made.containerPlacementId], [true, S, null]);
});

test("commands, as results and as streams", async () => {
  const result = await api.commands.execute("echo hi $A", S, undefined);
  assert.deepEqual([result.stdout, result.exitCode], ["hi 1", 0]);
  const events = await all(await api.commands.executeStream("echo a; exit 2", S));
  assert.deepEqual(events.map((event) => event.type), ["start", "stdout", "complete"]);
  assert.equal(events.at(-1).exitCode, 2);
});

test("many calls at once", async () => {
  const work = Array.from({ length: 50 }, (_, n) => api.commands.execute(`echo ${n}`, "__DISABLE_SESSION__"));
  assert.deepEqual((await Promise.all(work)).map((one) => one.stdout), Array.from({ length: 50 }, (_, n) => `${n}\n`));
});

test("files as text and as streams of any size, both ways", async () => {
  await api.files.writeFile("/workspace/f", "text", S);
  assert.equal((await api.files.readFile("/workspace/f", S)).content, "text");
  const large = Buffer.alloc(40_000_000, "skerry");
  const stream = new Blob([large]).stream();
  const written = await api.files.writeFileStream("/workspace/large", stream, S);
  assert.equal(written.bytesWritten, large.length);
  const read = await api.files.readFile("/workspace/large", S, { encoding: "none" });
  assert.equal(read.size, large.length);
  assert.ok((await bytes(read.content)).equals(large));
  const listed = await api.files.listFiles("/workspace", S, { recursive: true });
  assert.deepEqual(listed.files.map((file) => file.name), ["f", "large"]);
});

test("a stream that nobody reads to its end ends what made it", async () => {
  const stream = await api.commands.executeStream("yes 31415", S);
  const reader = stream.getReader();
  await reader.read();
  await reader.cancel();
  for (let tries = 0; ; tries++) {
    const { exitCode } = await api.commands.execute("pgrep -f 'yes 3141[5]'", "__DISABLE_SESSION__");
    if (exitCode === 1) break;
    assert.ok(tries < 200, "it still runs");
  }
});

test("errors carry their code and details", async () => {
  const error = await api.files.readFile("/nope", S).then(() => assert.fail(), (error) => error);
  assert.equal(error.message, "File not found: /nope");
  assert.equal(error.code, "FILE_NOT_FOUND");
  assert.equal(error.details.path, "/nope");
  const unknown = await api.files.nothing("/nope").then(() => assert.fail(), (error) => error);
  assert.equal(unknown.code, "UNKNOWN_ERROR");
});

test("code calls back while it runs", async () => {
  const context = await api.interpreter.createCodeContext({ language: "python", envVars: { COLOUR: "grey" } });
  const seen = [];
  await api.interpreter.runCodeStream(context.id, "import os\nprint(os.environ['COLOUR'])\n1/0", "python", {
    onStdout: (output) => void seen.push(["out", output.text]),
    onResult: (result) => void seen.push(["result", result.text]),
    onError: (error) => void seen.push(["error", error.name]),
  });
  assert.deepEqual(seen, [["out", "grey\n"], ["error", "ZeroDivisionError"]]);
  assert.deepEqual((await api.interpreter.listCodeContexts()).map((one) => one.id), [context.id]);
  await api.interpreter.deleteCodeContext(context.id);
});

test("processes, ports and changes", async () => {
  const started = await api.processes.startProcess("python3 -m http.server 8124", S, { processId: "web" });
  assert.equal(started.processId, "web");
  const ready = await all(await api.ports.watchPort({ port: 8124, mode: "http", processId: "web" }));
  assert.equal(ready.at(-1).type, "ready");
  assert.equal((await api.processes.getProcess("web")).process.status, "running");
  await api.processes.killProcess("web");
  assert.equal((await api.watch.checkChanges({ path: "/workspace" })).status, "unchanged");
  assert.equal(await api.utils.getVersion(), "0.12.10");
});

test("a tunnel is a preview, run by run", async () => {
  await api.processes.startProcess("python3 -m http.server 8125", S, { processId: "tunnelled" });
  await all(await api.ports.watchPort({ port: 8125, mode: "tcp", processId: "tunnelled" }));
  const request = { tunnelId: "quick-1", runId: "run-1", mode: "quick", port: 8125 };
  const first = await api.tunnels.ensureTunnelRun(request);
  assert.equal(first.started, true);
  assert.ok(first.run.url.includes(first.run.hostname));
  const again = await api.tunnels.ensureTunnelRun(request);
  assert.deepEqual([again.started, again.run.url], [false, first.run.url]);
  const other = await api.tunnels.ensureTunnelRun({ ...request, runId: "run-2" }).then(() => assert.fail(), (error) => error);
  assert.equal(other.code, "TUNNEL_RUN_CONFLICT");
  assert.deepEqual((await api.tunnels.listTunnels()).map((one) => [one.id, one.port]), [["quick-1", 8125]]);
  assert.deepEqual(await api.tunnels.stopTunnelRun({ tunnelId: "quick-1", runId: "run-2" }), { stopped: false });
  assert.deepEqual(await api.tunnels.stopTunnelRun({ tunnelId: "quick-1", runId: "run-1" }), { stopped: true });
  assert.equal((await api.tunnels.runQuickTunnel("quick-2", 8125)).port, 8125);
  assert.deepEqual(await api.tunnels.destroyTunnel("quick-2"), { success: true, id: "quick-2" });
  const gone = await api.tunnels.destroyTunnel("quick-2").then(() => assert.fail(), (error) => error);
  assert.equal(gone.code, "TUNNEL_NOT_FOUND");
  const named = await api.tunnels.runNamedTunnel("t", "token", 8125).then(() => assert.fail(), (error) => error);
  assert.equal(named.code, "VALIDATION_FAILED");
  await api.processes.killProcess("tunnelled");
});

test("archives", async () => {
  await api.commands.execute("mkdir -p /workspace/kept && echo kept >/workspace/kept/f", S);
  const made = await api.backup.createArchive("/workspace/kept", "/var/backups/rpc.sqsh", S, { excludes: [] });
  assert.equal(made.success, true);
  await api.backup.restoreArchive("/tmp/kept", "/var/backups/rpc.sqsh", S);
  assert.equal((await api.files.readFile("/tmp/kept/f", S)).content, "kept\n");
});

after(() => setTimeout(() => process.exit(), 100).unref());
