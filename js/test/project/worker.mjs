// A Worker as it is deployed at Cloudflare.
import { ContainerProxy, getSandbox, Sandbox } from "@cloudflare/sandbox";

export { ContainerProxy, Sandbox };

export default {
  async fetch(request, env) {
    const sandbox = getSandbox(env.Sandbox, "project");
    const { pathname } = new URL(request.url);
    if (pathname === "/destroy") await sandbox.destroy();
    return Response.json(pathname === "/destroy" ? "destroyed" : await sandbox.exec("echo $((6 * 7)) on $(hostname)"));
  },
};
