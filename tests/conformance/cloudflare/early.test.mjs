// The client of 0.3, which spoke before anything was settled; it has a base URL of its own.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";

console.log = console.error = () => {};
const { HttpClient } = await import("./node_modules/sandbox-0.3.7/dist/client.js");
const { InterpreterClient } = await import("./node_modules/sandbox-0.3.7/dist/interpreter-client.js");
const { parseSSEStream } = await import("./node_modules/sandbox-0.3.7/dist/sse-parser.js");
const BASE = process.env.BASE + "-0.3";
const client = new HttpClient({ baseUrl: BASE });
const interpreter = new InterpreterClient({ baseUrl: BASE });
const S = "early";

const refused = (work, said) => assert.rejects(work, (error) => said.test(error.message) || assert.fail(error.message));

async function all(stream) {
  const events = [];
  for await (const event of parseSSEStream(stream)) events.push(event);
  return events;
}

before(async () => {
  await client.createSession({ id: S, env: { A: "1" }, cwd: "/workspace", isolation: true });
  await client.createSession({ id: S });
});

test("commands want a session that was made", async () => {
  const result = await client.exec(S, "echo hi $A");
  assert.deepEqual([result.success, result.stdout], [true, "hi 1"]);
  await refused(client.exec("unknown", "true"), /Session 'unknown' not found/);
  const answer = await fetch(`${BASE}/api/execute`, { method: "POST", body: JSON.stringify({ id: "unknown", command: "true" }) });
  const { error, availableSessions } = await answer.json();
  assert.deepEqual([answer.status, error, availableSessions.includes(S)], [404, "Session 'unknown' not found", true]);
  assert.equal((await fetch(`${BASE}/api/execute`, { method: "POST", body: "{}" })).status, 400);
  const relative = { id: S, command: "pwd", cwd: "tmp" };
  assert.equal((await fetch(`${BASE}/api/execute`, { method: "POST", body: JSON.stringify(relative) })).status, 400);
  const events = await all(await client.execStream(S, "echo a; sleep 0.1; echo b >&2; (exit 3)"));
  assert.deepEqual(events.map((event) => event.type), ["start", "stdout", "stderr", "complete"]);
  assert.ok(events.every((event) => event.command.startsWith("echo a") && event.timestamp));
  assert.deepEqual(events.at(-1).result, { stdout: "a\n", stderr: "b\n", exitCode: 3, success: false });
});

test("files, but not the system's", async () => {
  await client.mkdir("/workspace/d", true, S);
  await client.writeFile("/workspace/d/f", "text", "utf-8", S);
  assert.equal((await client.readFile("/workspace/d/f", "utf-8", S)).content, "text");
  await client.renameFile("/workspace/d/f", "/workspace/d/g", S);
  await client.moveFile("/workspace/d/g", "/workspace/g", S);
  assert.deepEqual((await client.listFiles("/workspace", S)).files.map((file) => file.name).sort(), ["d", "g"]);
  assert.equal((await all(await client.readFileStream("/workspace/g", S))).at(-1).type, "complete");
  await client.deleteFile("/workspace/g", S);
  for (const path of ["/etc/passwd", "/", "/workspace/../etc/passwd", "/usr", "/proc/self/environ"]) {
    await refused(client.readFile(path, "utf-8", S), /Dangerous path/);
    await refused(client.writeFile(path, "x", "utf-8", S), /Dangerous path/);
  }
  assert.ok((await client.listFiles("/", S)).files.length > 3);
});

test("processes belong to sessions", async () => {
  await client.createSession({ id: "other" });
  const { process } = await client.startProcess("sleep 100", S, { processId: "p1", env: {} });
  assert.deepEqual([process.id, process.command, process.status, process.sessionId], ["p1", "sleep 100", "running", S]);
  await client.startProcess("sleep 100", "other", { processId: "p2" });
  assert.deepEqual((await client.listProcesses(S)).processes.map((one) => one.id), ["p1"]);
  assert.equal((await client.killAllProcesses(S)).killedCount, 1);
  assert.equal((await client.getProcess("p2")).process.status, "running");
  await client.killProcess("p2");
  assert.equal((await client.getProcessLogs("p2")).stdout, "");
  assert.equal((await all(await client.streamProcessLogs("p2"))).at(-1).type, "exit");
});

test("ports are exposed, listed, reached and unexposed", async () => {
  await client.startProcess("python3 -m http.server 8300", S, { processId: "web" });
  assert.equal((await client.exposePort(8300, "web")).port, 8300);
  assert.deepEqual((await client.getExposedPorts()).ports.map((one) => [one.port, one.name]), [[8300, "web"]]);
  let page;
  for (let tries = 0; tries < 200 && page?.status !== 200; tries++) page = await fetch(`${BASE}/proxy/8300/`);
  assert.match(await page.text(), /Directory listing/);
  await client.killProcess("web");
  const dead = await fetch(`${BASE}/proxy/8300/`);
  assert.equal(dead.status, 502);
  assert.match((await dead.json()).error, /Service on port 8300 is not responding/);
  await client.unexposePort(8300);
  await refused(client.unexposePort(8300), /not exposed/);
  assert.equal((await fetch(`${BASE}/proxy/8300/`)).status, 404);
});

test("code gives a line for each event", async () => {
  const context = await interpreter.createCodeContext({ language: "python" });
  assert.ok(context.id && !Number.isNaN(context.createdAt.getTime()));
  const seen = [];
  const run = (id, code) =>
    interpreter.runCodeStream(id, code, "python", {
      onStdout: (output) => void seen.push(["out", output.text]),
      onResult: (result) => void seen.push(["result", result.text]),
      onError: (error) => void seen.push(["error", error.name, error.value]),
    });
  await run(context.id, "print(1)\n2+2");
  await run(context.id, "1/0");
  assert.deepEqual(seen, [["out", "1\n"], ["result", "4"], ["error", "ZeroDivisionError", "division by zero"]]);
  assert.deepEqual((await interpreter.listCodeContexts()).map((one) => one.id), [context.id]);
  await interpreter.deleteCodeContext(context.id);
  for (const work of [() => run(context.id, "1"), () => interpreter.deleteCodeContext(context.id)]) {
    const error = await work().then(() => assert.fail(), (error) => error);
    assert.deepEqual([error.code, error.contextId], ["CONTEXT_NOT_FOUND", context.id]);
  }
});

test("a repository is cloned where nobody said to", async () => {
  await client.exec(S, "git init -q -b main /tmp/origin && cd /tmp/origin && git -c user.name=n -c user.email=e commit -q --allow-empty -m first; cd /workspace");
  const done = await client.gitCheckout("file:///tmp/origin", S);
  assert.deepEqual([done.branch, done.exitCode], ["main", 0]);
  assert.match(done.targetDir, /repo_\d+_[0-9a-f]+$/);
});

after(() => setTimeout(() => process.exit(), 100).unref());
