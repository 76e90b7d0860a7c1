// Clients of earlier releases, each in a directory of its own: what they ask differently.
import assert from "node:assert/strict";
import { test } from "node:test";

const BASE = process.env.BASE;
for (const version of process.env.VERSIONS.split(" ")) {
  test(version, async (t) => {
    const { SandboxClient } = await import(`sandbox-${version}`);
    const client = new SandboxClient({ baseUrl: BASE });
    const session = `v${version.replaceAll(".", "-")}`;
    await t.test("commands, files and processes", async () => {
      await client.utils.createSession({ id: session, env: { A: "1" }, cwd: "/workspace" });
      assert.equal((await client.commands.execute("echo hi $A", session)).stdout, "hi 1");
      await client.files.writeFile(`/workspace/${session}.txt`, "text", session);
      assert.equal((await client.files.readFile(`/workspace/${session}.txt`, session)).content, "text");
      const started = await client.processes.startProcess("sleep 100", session, { processId: session });
      assert.equal(started.processId, session);
      await client.processes.killProcess(session);
      const context = await client.interpreter.createCodeContext({ language: "python" });
      const results = [];
      await client.interpreter.runCodeStream(context.id, "2+2", "python", { onResult: (result) => void results.push(result.text) });
      assert.deepEqual(results, ["4"]);
    });
    if (client.desktop) await t.test("no desktop", async () => {
      assert.equal((await client.desktop.status()).status, "inactive");
      for (const asked of [() => client.desktop.start(), () => client.desktop.click(1, 1), () => client.desktop.screenshot()]) {
        const refused = await asked().then(() => assert.fail(), (error) => error);
        assert.deepEqual([refused.constructor.name, refused.code], ["DesktopUnavailableError", "DESKTOP_UNAVAILABLE"]);
      }
    });
    await t.test("ports", async () => {
      const port = 9000 + Number(version.split(".")[1]);
      await client.processes.startProcess(`python3 -m http.server ${port}`, session, { processId: `web-${session}` });
      const exposed = await client.ports.exposePort(port, session, "web");
      assert.deepEqual([exposed.port, exposed.name], [port, "web"]);
      const again = await client.ports.exposePort(port, session).then(() => assert.fail(), (error) => error);
      assert.equal(again.code, "PORT_ALREADY_EXPOSED");
      const { ports } = await client.ports.getExposedPorts(session);
      assert.ok(ports.some((one) => one.port === port && one.status === "active"));
      let page;
      for (let tries = 0; tries < 200 && page?.status !== 200; tries++) page = await fetch(`${BASE}/proxy/${port}/`);
      assert.match(await page.text(), /Directory listing/);
      await client.ports.unexposePort(port, session);
      const gone = await client.ports.unexposePort(port, session).then(() => assert.fail(), (error) => error);
      assert.equal(gone.code, "PORT_NOT_EXPOSED");
      assert.equal((await fetch(`${BASE}/proxy/${port}/`)).status, 404);
    });
  });
}
