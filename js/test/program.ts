// A program as people write it for Cloudflare's SDK. Only the import and the first argument of getSandbox() are ours.
import {
  collectFile,
  getSandbox,
  isExecResult,
  parseSSEStream,
  proxyToSandbox,
  Sandbox,
  SessionTerminatedError,
  skerry,
  streamFile,
  UnsupportedInNodeError,
  type BackupOptions,
  type CodeContext,
  type DirectoryBackup,
  type ExecEvent,
  type ExecResult,
  type ExecutionSession,
  type FileWatchSSEEvent,
  type LogEvent,
  type Process,
  type SandboxOptions,
} from "@skerry/sandbox";
import { startEngine, type Engine } from "@skerry/sandbox/engine";

class Builder extends Sandbox {
  override sleepAfter = "5m";
  override envVars = { NODE_ENV: "production" };

  override async onStart(): Promise<void> {
    await this.exec("mkdir -p /workspace/build");
  }
}

interface Env {
  Sandbox: ReturnType<typeof skerry<Builder>>;
}

export async function handle(request: Request, env: Env): Promise<Response> {
  const preview = await proxyToSandbox(request, env);
  if (preview) return preview;
  const options: SandboxOptions = { keepAlive: true, sleepAfter: "10m", normalizeId: true, transport: "rpc", labels: { team: "a" } };
  const sandbox = getSandbox(env.Sandbox, "user-1", options);

  const result: ExecResult = await sandbox.exec("npm test", {
    timeout: 60_000,
    env: { CI: "1" },
    cwd: "/workspace",
    stream: true,
    onOutput: (stream: "stdout" | "stderr", data: string) => console.log(stream, data),
  });
  if (!isExecResult(result) || !result.success) return new Response(result.stderr, { status: 500 });

  for await (const event of parseSSEStream<ExecEvent>(await sandbox.execStream("ls"))) if (event.type === "complete") console.log(event.exitCode);

  const server: Process = await sandbox.startProcess("node server.js", { processId: "web", env: { PORT: "8080" } });
  await server.waitForPort(8080, { mode: "http", path: "/health", timeout: 5000 });
  const { line } = await server.waitForLog(/ready in (\d+) ms/);
  for await (const event of parseSSEStream<LogEvent>(await sandbox.streamProcessLogs(server.id))) console.log(event.data, line);
  await sandbox.killProcess(server.id, "SIGTERM");

  await sandbox.writeFile("/workspace/a.bin", "AAAA", { encoding: "base64" });
  const { content, metadata } = await collectFile(await sandbox.readFileStream("/workspace/a.bin"));
  for await (const chunk of streamFile(await sandbox.readFileStream("/workspace/a.bin"))) console.log(chunk.length, content.length, metadata.size);
  const { files } = await sandbox.listFiles("/workspace", { recursive: true, includeHidden: false });
  console.log(files.map((file) => `${file.mode} ${file.absolutePath}`));
  const { targetDir } = await sandbox.gitCheckout("https://example.com/repo.git", { branch: "main", depth: 1 });

  const session: ExecutionSession = await sandbox.createSession({ id: "build", cwd: targetDir, env: { A: "1" }, commandTimeoutMs: 1000 });
  try {
    await session.exec("exit 3");
  } catch (error) {
    if (error instanceof SessionTerminatedError) console.log(error.exitCode, error.sessionId);
  }
  await sandbox.deleteSession(session.id);

  const context: CodeContext = await sandbox.createCodeContext({ language: "python", envVars: { A: "1" } });
  const execution = await sandbox.runCode("1 + 1", { context, onStdout: (output) => console.log(output.text), timeout: 1000 });
  console.log(execution.results[0]?.text, execution.error?.name);

  const { url } = await sandbox.exposePort(8080, { hostname: "example.com", name: "web", token: "v1" });
  const ports = await sandbox.getExposedPorts("example.com");
  console.log(url, ports.length, await sandbox.validatePortToken(8080, "v1"), (await sandbox.tunnels.get(8080)).url);

  const wanted: BackupOptions = { dir: "/workspace", name: "nightly", ttl: 3600, gitignore: true, excludes: ["*.log"] };
  const backup: DirectoryBackup = await sandbox.createBackup(wanted);
  const { success } = await sandbox.restoreBackup({ ...backup, dir: "/workspace/old" });
  await sandbox.mountBucket("data", "/data", { endpoint: "https://s3.example.com", readOnly: success });
  await sandbox.unmountBucket("/data");

  for await (const event of parseSSEStream<FileWatchSSEEvent>(await sandbox.watch("/workspace", { recursive: true }))) {
    if (event.type === "event") break;
  }
  if (request.headers.get("Upgrade") === "websocket") return sandbox.terminal(request, { cols: 80, rows: 24 });
  await sandbox.setAllowedHosts(["pypi.org"]);
  await sandbox.setOutboundByHost("example.com", "handler").catch((error: unknown) => error instanceof UnsupportedInNodeError);

  // @ts-expect-error: a port is a number
  await sandbox.unexposePort("8080");
  // @ts-expect-error: there is no such method
  await sandbox.execute("ls");
  // @ts-expect-error: the host name is required
  await sandbox.exposePort(8080, {});

  await sandbox.destroy();
  return sandbox.containerFetch(request, 8080);
}

export const env: Env = { Sandbox: skerry<Builder>("http://127.0.0.1:8787", { apiKey: "key", class: Builder }) };
export const others = [getSandbox("http://127.0.0.1:8787", "a"), getSandbox(process.env, "b"), getSandbox({ url: new URL("http://[::1]:1") }, "c")];
export const engine: Promise<Engine> = startEngine({ socketPath: "/tmp/skerry.sock", url: "http://127.0.0.1:8787" });
