// A WebSocket server in a few lines: says which path was asked for, and nothing more.
import { createHash } from "node:crypto";
import { createServer } from "node:http";

const server = createServer((_, answer) => answer.end("no WebSocket"));
server.on("upgrade", (request, socket) => {
  const key = createHash("sha1").update(`${request.headers["sec-websocket-key"]}258EAFA5-E914-47DA-95CA-C5AB0DC85B11`).digest("base64");
  const head = `HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: ${key}\r\n\r\n`;
  const text = Buffer.from(`path ${request.url}`);
  socket.write(Buffer.concat([Buffer.from(head), Buffer.from([0x81, text.length]), text]));
  socket.on("data", () => socket.end());
});
server.listen(Number(process.argv[2]), "127.0.0.1");
