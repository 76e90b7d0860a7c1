// The genuine client against a running server: every method of every part, when it works and when it does not.
import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { parseSSEStream, SandboxClient } from "@cloudflare/sandbox";

const BASE = process.env.BASE;
const overSocket = { transportMode: "websocket", wsUrl: BASE.replace(/^http/, "ws") + "/ws" };
const client = new SandboxClient({ baseUrl: BASE, ...(process.env.TRANSPORT === "websocket" ? overSocket : {}) });
const S = "s1";

async function all(stream) {
  const events = [];
  for await (const event of parseSSEStream(stream)) events.push(event);
  return events;
}

async function refused(work, code, status) {
  let error = await work.then(() => assert.fail("it was not refused"), (error) => error);
  // Over a socket the client knows no kinds of errors for streams: it says what it was told.
  const told = /^Stream error: \d+ - (.*)$/s.exec(error.message);
  if (told && process.env.TRANSPORT) error = JSON.parse(told[1]);
  assert.equal(error.code, code, error.stack);
  if (status) assert.equal(error.httpStatus, status);
  return error;
}

before(() => client.utils.createSession({ id: S, cwd: "/workspace", env: { A: "1" } }));

describe("utils", () => {
  test("sessions are made once, and deleted", async () => {
    const made = await client.utils.createSession({ id: "another", env: {}, cwd: "/tmp" });
    assert.equal(made.success, true);
    const error = await refused(client.utils.createSession({ id: "another" }), "SESSION_ALREADY_EXISTS", 409);
    assert.equal(error.context.sessionId, "another");
    assert.equal((await client.commands.execute("pwd", "another")).stdout, "/tmp");
    assert.equal((await client.utils.deleteSession("another")).sessionId, "another");
    await refused(client.utils.deleteSession("another"), "INTERNAL_ERROR", 500);
  });
  test("a session in a directory that is not there begins at home", async () => {
    await client.utils.createSession({ id: "lost", cwd: "/nonexistent" });
    assert.equal((await client.commands.execute("pwd", "lost")).stdout, "/root");
  });
  test("ping, version and commands", async () => {
    assert.equal(await client.utils.ping(), "pong");
    assert.equal(await client.utils.getVersion(), "0.12.10");
    assert.ok((await client.utils.getCommands()).includes("bash"));
  });
});

describe("commands", () => {
  test("output loses one newline at its end, and only one", async () => {
    const result = await client.commands.execute("printf 'a\\n\\n'; echo err >&2", S);
    assert.deepEqual([result.stdout, result.stderr, result.exitCode, result.success], ["a\n", "err", 0, true]);
    assert.equal(result.sessionId, S);
    const bare = await client.commands.execute("echo a; echo; exit 2", "__DISABLE_SESSION__");
    assert.deepEqual([bare.stdout, bare.exitCode], ["a\n\n", 2]);
  });
  test("a session keeps its directory and variables; a command's own are its own", async () => {
    await client.commands.execute("cd /tmp; export Q=7", S);
    assert.equal((await client.commands.execute("pwd; echo $Q $A", S)).stdout, "/tmp\n7 1");
    const result = await client.commands.execute("pwd; echo $E", S, { cwd: "/usr", env: { E: "x" } });
    assert.equal(result.stdout, "/usr\nx");
    assert.equal((await client.commands.execute("pwd; echo [$E]", S)).stdout, "/tmp\n[]");
    await client.commands.execute("cd /workspace", S);
  });
  test("what fails is a result", async () => {
    const unknown = await client.commands.execute("nosuchcmd_x", S);
    assert.equal(unknown.exitCode, 127);
    assert.match(unknown.stderr, /^bash: line \d+: nosuchcmd_x: command not found$/);
    const events = await all(await client.commands.executeStream("nosuchcmd_x", S));
    assert.match(events.find((event) => event.type === "stderr").data, /^bash: line \d+: nosuchcmd_x/);
    const nowhere = await client.commands.execute("pwd", S, { cwd: "/nonexist" });
    assert.deepEqual([nowhere.exitCode, nowhere.stderr], [1, "Failed to change directory to '/nonexist'"]);
    assert.equal((await client.commands.execute("cat", S)).stdout, "");
    assert.equal((await client.commands.execute('printf "\\xff\\xfe"', S)).stdout, "\ufffd\ufffd");
  });
  test("exit ends the session's shell, and the next command has a fresh one", async () => {
    const error = await refused(client.commands.execute("exit 3", S), "SESSION_TERMINATED", 410);
    assert.deepEqual(error.context, { sessionId: S, exitCode: 3 });
    assert.equal((await client.commands.execute("echo again", S)).stdout, "again");
  });
  test("a timeout ends the command, and the session is free", async () => {
    const began = Date.now();
    const error = await refused(client.commands.execute("sleep 60", S, { timeoutMs: 300 }), "COMMAND_EXECUTION_ERROR", 500);
    assert.match(error.message, /Command timeout after 300ms/);
    await client.commands.execute("true", S);
    assert.ok(Date.now() - began < 30_000);
  });
  test("unknown sessions are made; commands of one wait for each other", async () => {
    assert.equal((await client.commands.execute("echo x", "by-itself")).stdout, "x");
    const append = (n) => client.commands.execute(`echo in${n} >>/tmp/order; sleep 0.2; echo out${n} >>/tmp/order`, "by-itself");
    await Promise.all([append(1), append(2), append(3)]);
    const lines = (await client.commands.execute("cat /tmp/order", "by-itself")).stdout.split("\n");
    for (let i = 0; i < 6; i += 2) assert.equal(lines[i].replace("in", "out"), lines[i + 1]);
  });
  test("a stream has a start, output as it comes, and an end, also after exit", async () => {
    const events = await all(await client.commands.executeStream("echo a; sleep 0.1; echo b >&2; exit 2", S));
    assert.deepEqual(events.map((event) => event.type), ["start", "stdout", "stderr", "complete"]);
    assert.deepEqual([events[1].data, events[2].data, events[3].exitCode], ["a\n", "b\n", 2]);
  });
});

describe("files", () => {
  test("text and bytes are written, with the directories above, and read", async () => {
    await client.files.writeFile("/workspace/new/dir/f.txt", "hello\n", S);
    const text = await client.files.readFile("/workspace/new/dir/f.txt", S);
    assert.deepEqual([text.content, text.encoding, text.isBinary, text.mimeType, text.size], ["hello\n", "utf-8", false, "text/plain", 6]);
    await client.files.writeFile("/workspace/b.bin", "AAEC/w==", S, { encoding: "base64" });
    const bytes = await client.files.readFile("/workspace/b.bin", S);
    assert.deepEqual([bytes.content, bytes.encoding, bytes.isBinary, bytes.size], ["AAEC/w==", "base64", true, 4]);
    const forced = await client.files.readFile("/workspace/new/dir/f.txt", S, { encoding: "base64" });
    assert.deepEqual([forced.content, forced.encoding], ["aGVsbG8K", "base64"]);
  });
  test("a relative path is meant from where the session stands", async () => {
    await client.commands.execute("mkdir -p /tmp/rel; cd /tmp/rel", "relative");
    await client.files.writeFile("here.txt", "r", "relative");
    assert.equal((await client.files.readFile("/tmp/rel/here.txt", S)).content, "r");
  });
  test("what cannot be is refused by name", async () => {
    await client.files.mkdir("/workspace/d", S);
    await refused(client.files.readFile("/nope", S), "FILE_NOT_FOUND", 404);
    await refused(client.files.readFile("/workspace/d", S), "FILE_NOT_FOUND", 404);
    await refused(client.files.writeFile("/workspace/d", "x", S), "FILESYSTEM_ERROR", 500);
    await refused(client.files.writeFile("", "x", S), "VALIDATION_FAILED", 400);
    await refused(client.files.writeFile("/tmp/x\0y", "x", S), "VALIDATION_FAILED", 400);
    await refused(client.files.writeFile("/tmp/b", "!!!", S, { encoding: "base64" }), "VALIDATION_FAILED", 400);
    await refused(client.files.mkdir("/workspace/d", S), "FILESYSTEM_ERROR", 500);
    await refused(client.files.mkdir("/workspace/x/y/z", S), "FILESYSTEM_ERROR", 500);
    await refused(client.files.deleteFile("/workspace/d", S), "IS_DIRECTORY", 400);
    await refused(client.files.deleteFile("/workspace/none", S), "FILE_NOT_FOUND", 404);
    await refused(client.files.renameFile("/nope", "/n2", S), "FILE_NOT_FOUND", 404);
    await refused(client.files.moveFile("/nope", "/n2", S), "FILE_NOT_FOUND", 404);
    await refused(client.files.listFiles("/nope", S), "FILE_NOT_FOUND", 404);
    await refused(client.files.listFiles("/etc/passwd", S), "NOT_DIRECTORY", 400);
  });
  test("a large file is read as a stream, and said to be too large otherwise", async () => {
    await client.commands.execute("head -c 34000000 /dev/zero >/workspace/big", S);
    const error = await refused(client.files.readFile("/workspace/big", S), "FILE_TOO_LARGE", 413);
    assert.deepEqual([error.context.actualSize, error.context.maxSize], [34000000, 33554432]);
    const events = await all(await client.files.readFileStream("/workspace/big", S));
    assert.equal(events[0].type, "metadata");
    assert.equal(events.at(-1).bytesRead, 34000000);
    const size = events.filter((event) => event.type === "chunk").reduce((sum, event) => sum + Buffer.from(event.data, "base64").length, 0);
    assert.equal(size, 34000000);
    const missing = await all(await client.files.readFileStream("/nope", S));
    assert.deepEqual(missing, [{ type: "error", error: "File not found: /nope" }]);
  });
  test("renamed, moved, listed, deleted", async () => {
    await client.files.writeFile("/workspace/l/.hidden", "", S);
    await client.files.writeFile("/workspace/l/one", "1", S);
    assert.equal((await client.files.renameFile("/workspace/l/one", "/workspace/l/two", S)).newPath, "/workspace/l/two");
    await client.files.mkdir("/workspace/l/sub", S, { recursive: true });
    await client.files.moveFile("/workspace/l/two", "/workspace/l/sub/two", S);
    const plain = await client.files.listFiles("/workspace/l", S);
    assert.deepEqual(plain.files.map((file) => file.name), ["sub"]);
    const whole = await client.files.listFiles("/workspace/l", S, { recursive: true, includeHidden: true });
    assert.deepEqual(whole.files.map((file) => file.relativePath).sort(), [".hidden", "sub", "sub/two"]);
    const two = whole.files.find((file) => file.name === "two");
    assert.deepEqual(
      [two.type, two.size, two.mode, two.permissions],
      ["file", 1, "rw-r--r--", { readable: true, writable: true, executable: false }],
    );
    await client.files.deleteFile("/workspace/l/sub/two", S);
    assert.equal((await client.files.exists("/workspace/l/sub/two", S)).exists, false);
    assert.equal((await client.files.exists("/workspace/l/sub", S)).exists, true);
  });
});

describe("processes", () => {
  test("one is started, followed to its end, and its id used again", async () => {
    const started = await client.processes.startProcess("for i in 1 2 3; do echo $i; sleep 0.1; done; exit 4", S, { processId: "p1" });
    assert.equal(started.processId, "p1");
    assert.ok(started.pid > 0);
    const events = await all(await client.processes.streamProcessLogs("p1"));
    assert.equal(events[0].type, "process_info");
    assert.equal(events.filter((event) => event.type === "stdout").map((event) => event.data).join(""), "1\n2\n3\n");
    assert.deepEqual([events.at(-1).type, events.at(-1).exitCode, events.at(-1).data], ["exit", 4, "Process failed with exit code 4"]);
    const { process } = await client.processes.getProcess("p1");
    assert.deepEqual([process.status, process.exitCode], ["failed", 4]);
    assert.equal((await client.processes.getProcessLogs("p1")).stdout, "1\n2\n3\n");
    await client.processes.startProcess("sleep 100", S, { processId: "p1" });
    await client.processes.killProcess("p1");
    assert.equal((await client.processes.getProcess("p1")).process.status, "killed");
  });
  test("unknown ones are not found; all are killed at once", async () => {
    for (const work of ["getProcess", "getProcessLogs", "streamProcessLogs", "killProcess"])
      await refused(client.processes[work]("nope"), "PROCESS_NOT_FOUND", 404);
    await client.processes.startProcess("sleep 100", S);
    await client.processes.startProcess("sleep 100", S);
    assert.equal((await client.processes.killAllProcesses()).cleanedCount, 2);
    const { processes } = await client.processes.listProcesses();
    assert.ok(processes.every((process) => process.status !== "running"));
  });
  test("a port is waited for, with its process", async () => {
    await client.processes.startProcess("python3 -m http.server 8123 --bind 127.0.0.1", S, { processId: "web" });
    const watch = (options) => client.ports.watchPort({ port: 8123, mode: "http", path: "/", statusMin: 200, statusMax: 399, ...options });
    const ready = await all(await watch({ processId: "web" }));
    assert.deepEqual(ready, [{ type: "watching", port: 8123 }, { type: "ready", port: 8123, statusCode: 200 }]);
    await client.processes.killProcess("web");
    assert.equal((await all(await watch({ mode: "tcp", processId: "web" }))).at(-1).type, "process_exited");
    assert.deepEqual((await all(await watch({ processId: "zzz" }))).at(-1), { type: "error", port: 8123, error: "Process not found" });
  });
});

describe("interpreter", () => {
  test("code runs in a context, with output as it comes", async () => {
    const context = await client.interpreter.createCodeContext({ language: "python" });
    assert.deepEqual([context.language, context.cwd], ["python", "/workspace"]);
    const seen = [];
    const run = (code) =>
      client.interpreter.runCodeStream(context.id, code, "python", {
        onStdout: (output) => seen.push(["out", output.text]),
        onResult: (result) => seen.push(["result", result.text]),
        onError: (error) => seen.push(["error", error.name, error.message ?? error.value]),
      });
    await run("x = 41\nprint(1)\nx + 1");
    assert.deepEqual(seen, [["out", "1\n"], ["result", "42"]]);
    await run("1/0");
    assert.deepEqual(seen.at(-1), ["error", "ZeroDivisionError", "division by zero"]);
    assert.ok((await client.interpreter.listCodeContexts()).some((one) => one.id === context.id));
    await client.interpreter.deleteCodeContext(context.id);
    await refused(client.interpreter.deleteCodeContext(context.id), "CONTEXT_NOT_FOUND", 404);
    await refused(run("1"), "CONTEXT_NOT_FOUND");
  });
  test("javascript gives objects, typescript loses its types, unknown languages are python", async () => {
    for (const language of ["javascript", "typescript"]) {
      const context = await client.interpreter.createCodeContext({ language });
      const results = [];
      const code = language === "typescript" ? "const a: {x: number} = {x: 1}; a" : "const a = {x: 1}; a";
      await client.interpreter.runCodeStream(context.id, code, language, { onResult: (result) => results.push(result.json) });
      assert.deepEqual(results, [{ x: 1 }]);
    }
    assert.equal((await client.interpreter.createCodeContext({ language: "ruby" })).language, "python");
  });
});

describe("watch and git", () => {
  test("changes are seen as they happen, and counted", async () => {
    await client.files.mkdir("/workspace/w", S);
    const first = await client.watch.checkChanges({ path: "/workspace/w" });
    assert.equal(first.status, "unchanged");
    const stream = await client.watch.watch({ path: "/workspace/w" });
    const events = parseSSEStream(stream)[Symbol.asyncIterator]();
    assert.equal((await events.next()).value.type, "watching");
    await client.files.writeFile("/workspace/w/f", "x", S);
    const { value } = await events.next();
    assert.equal(value.type, "event");
    await events.return();
    assert.equal((await client.watch.checkChanges({ path: "/workspace/w", since: first.version })).status, "changed");
    await refused(client.watch.checkChanges({ path: "/tmp" }), "PERMISSION_DENIED", 403);
    await refused(client.watch.checkChanges({ path: "/workspace", since: "zzz" }), "VALIDATION_FAILED", 400);
    await refused(client.watch.watch({ path: "/workspace/none" }), "FILE_NOT_FOUND", 404);
  });
  test("a repository is cloned", async () => {
    await client.commands.execute(
      "git init -q -b main /tmp/origin && cd /tmp/origin && git -c user.name=n -c user.email=e commit -q --allow-empty -m first",
      "git",
    );
    const done = await client.git.checkout("file:///tmp/origin", S, { targetDir: "/workspace/cloned", branch: "main" });
    assert.deepEqual([done.branch, done.targetDir], ["main", "/workspace/cloned"]);
    const error = await client.git.checkout("file:///nope/x.git", S).catch((error) => error);
    assert.deepEqual([error.code, error.httpStatus], ["GIT_OPERATION_FAILED", 500]);
    const depth = client.git.checkout("file:///tmp/origin", S, { targetDir: "/workspace/none", depth: 0 });
    await assert.rejects(depth, /depth/i);
  });
});

after(() => setTimeout(() => process.exit(), 100).unref());
