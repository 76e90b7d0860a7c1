// Archives of directories: made, restored, and sent away in parts, as the Sandbox class asks the container to.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { SandboxClient } from "@cloudflare/sandbox";

const client = new SandboxClient({ baseUrl: process.env.BASE });
const S = "backups";
const archive = (name) => `/var/backups/${name}.sqsh`;
const run = async (command) => (await client.commands.execute(command, S)).stdout;

async function refused(work, code, status) {
  const error = await work.then(() => assert.fail("it was not refused"), (error) => error);
  assert.equal(error.code, code, error.stack);
  assert.equal(error.httpStatus, status);
  return error;
}

before(async () => {
  await client.utils.createSession({ id: S, cwd: "/workspace", env: {} });
  await run("mkdir -p d/.git d/deep d/node_modules; cd d; echo one >deep/f; ln -s deep/f l; echo x >x.log; echo '*.log' >.gitignore; echo m >node_modules/m; cd ..");
});

test("a directory becomes an archive, and the archive the directory again", async () => {
  const made = await client.backup.createArchive("/workspace/d", archive("whole"), S);
  assert.deepEqual([made.success, made.archivePath], [true, archive("whole")]);
  assert.equal(Number(await run(`stat -c %s ${archive("whole")}`)), made.sizeBytes);
  await run("echo two >d/deep/f; echo later >d/later");
  assert.deepEqual(await client.backup.restoreArchive("/workspace/d", archive("whole"), S), { success: true, dir: "/workspace/d" });
  assert.equal(await run("cat d/l; ls -A d"), "one\n.git\n.gitignore\ndeep\nl\nnode_modules\nx.log");
  await client.backup.restoreArchive("/tmp/elsewhere/d", archive("whole"), S);
  assert.equal(await run("diff -r d /tmp/elsewhere/d && echo same"), "same");
});

test("it is a squashfs, which the class itself unpacks for local buckets", async () => {
  for (const format of ["gzip", "lz4", "zstd"]) {
    await client.backup.createArchive("/workspace/d", archive(format), S, { compression: { format, threads: 2 } });
    await run(`/usr/bin/unsquashfs -f -d /tmp/${format} ${archive(format)}`);
    assert.equal(await run(`cat /tmp/${format}/deep/f`), "one");
  }
});

test("what is excluded or ignored is not in it", async () => {
  await client.backup.createArchive("/workspace/d", archive("less"), S, { excludes: ["node_modules"], gitignore: true });
  await client.backup.restoreArchive("/tmp/less", archive("less"), S);
  assert.equal(await run("ls -A /tmp/less"), ".git\n.gitignore\ndeep\nl");
});

test("an image without squashfs has archives, too", async () => {
  await run("mkdir /tmp/aside; mv /usr/bin/*squashfs /tmp/aside");
  try {
    await client.backup.createArchive("/workspace/d", archive("plain"), S);
    await client.backup.restoreArchive("/tmp/plain", archive("plain"), S);
    assert.equal(await run("cat /tmp/plain/l"), "one");
    const error = await refused(client.backup.restoreArchive("/tmp/plain", archive("whole"), S), "BACKUP_RESTORE_FAILED", 500);
    assert.match(error.message, /squashfs-tools/);
    assert.equal(await run("cat /tmp/plain/l"), "one");
  } finally {
    await run("mv /tmp/aside/* /usr/bin");
  }
});

test("what cannot be is refused and changes nothing", async () => {
  await refused(client.backup.createArchive("/workspace/d", "/tmp/x.sqsh", S), "INVALID_BACKUP_CONFIG", 400);
  await refused(client.backup.createArchive("/workspace/d", "/var/backups/../x.sqsh", S), "INVALID_BACKUP_CONFIG", 400);
  await refused(client.backup.createArchive("/workspace/d", "/var/backups-of-others/x.sqsh", S), "INVALID_BACKUP_CONFIG", 400);
  const outside = await refused(client.backup.createArchive("/etc", archive("x"), S), "INVALID_BACKUP_CONFIG", 400);
  assert.deepEqual(outside.context, { dir: "/etc", archivePath: archive("x") });
  await refused(client.backup.createArchive("/workspace/none", archive("x"), S), "BACKUP_CREATE_FAILED", 500);
  const missing = await refused(client.backup.restoreArchive("/workspace/d", archive("none"), S), "BACKUP_RESTORE_FAILED", 500);
  assert.equal(missing.message, `Archive file does not exist: ${archive("none")}`);
  await run(`head -c 200 ${archive("whole")} >${archive("torn")}; echo nonsense >${archive("nonsense")}`);
  for (const name of ["torn", "nonsense"])
    await refused(client.backup.restoreArchive("/workspace/d", archive(name), S), "BACKUP_RESTORE_FAILED", 500);
  assert.equal(await run("cat d/l; ls -A /var/backups | grep -c part; ls -Ad /workspace/.skerry* 2>/dev/null"), "one\n0");
});

const KEEPER = `
import http.server, ssl
class Keeper(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_PUT(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        part = self.path.rsplit("=", 1)[1]
        open("/tmp/kept-" + part, "wb").write(body)
        self.send_response(403 if part == "9" else 200)
        self.send_header("ETag", '"tag-%s"' % part)
        self.send_header("Content-Length", "0")
        self.end_headers()
server = http.server.ThreadingHTTPServer(("127.0.0.1", 8443), Keeper)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain("/tmp/tls.pem")
server.socket = context.wrap_socket(server.socket, server_side=True)
server.serve_forever()
`;

test("an archive is sent away in parts", async () => {
  await run(
    "openssl req -x509 -newkey rsa:2048 -nodes -keyout /tmp/key.pem -out /tmp/cert.pem -subj /CN=localhost " +
      "-addext subjectAltName=DNS:localhost; cat /tmp/key.pem /tmp/cert.pem >/tmp/tls.pem; " +
      "mkdir -p /etc/ssl/certs; cp /tmp/cert.pem /etc/ssl/certs/$(openssl x509 -hash -noout -in /tmp/cert.pem).0",
  );
  await client.files.writeFile("/tmp/keeper.py", KEEPER, S);
  await client.processes.startProcess("python3 /tmp/keeper.py", S, { processId: "keeper" });
  const waiting = await client.ports.watchPort({ port: 8443, mode: "tcp", processId: "keeper" });
  for await (const _ of waiting);
  await run(`head -c 300000 /dev/urandom >${archive("large")}`);
  const part = (partNumber, offset, size) => ({ partNumber, offset, size, url: `https://localhost:8443/object?partNumber=${partNumber}` });
  const parts = [part(1, 0, 100000), part(2, 100000, 100000), part(3, 200000, 100000)];
  const sent = await client.backup.uploadParts({ archivePath: archive("large"), parts }, S);
  assert.deepEqual(sent, { success: true, parts: [1, 2, 3].map((n) => ({ partNumber: n, etag: `"tag-${n}"` })) });
  assert.equal(await run(`cat /tmp/kept-1 /tmp/kept-2 /tmp/kept-3 | cmp - ${archive("large")} && echo same`), "same");
  await refused(client.backup.uploadParts({ archivePath: archive("large"), parts: [part(9, 0, 10)] }, S), "BACKUP_CREATE_FAILED", 500);
  await refused(client.backup.uploadParts({ archivePath: archive("large"), parts: [part(1, 299999, 10)] }, S), "BACKUP_CREATE_FAILED", 500);
  const plain = [{ ...part(1, 0, 10), url: "http://localhost:8443/object" }];
  await refused(client.backup.uploadParts({ archivePath: archive("large"), parts: plain }, S), "INVALID_BACKUP_CONFIG", 400);
});

after(() => setTimeout(() => process.exit(), 100).unref());
