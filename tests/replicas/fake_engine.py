"""A process that looks like an engine to the fleet: standard library only, up in 0.1 s, and able to
misbehave in the ways that tests of the supervisor need."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
parser.add_argument("--model", default="m")
parser.add_argument("--fail", help="print this and exit with code 3")
parser.add_argument("--silent-start", action="store_true", help="never listen")
parser.add_argument("--deaf", action="store_true", help="ignore SIGTERM")
parser.add_argument("--children", help="start a child and an escaped grandchild, write the pids here")
parser.add_argument("--no-start-time", action="store_true")
parser.add_argument("--stuck", action="store_true", help="answer, and report a request that never ends")
args = parser.parse_args()
began = time.time()

if args.fail:
    print("loading")
    sys.exit(print(args.fail) or 3)
if args.deaf:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if args.children:
    sleeper = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]
    child = subprocess.Popen(sleeper)
    read, write = os.pipe()
    if os.fork() == 0:  # its child goes to a session of its own and loses its parent
        os.setsid()
        os.close(read)
        lost = subprocess.Popen(sleeper, close_fds=True)
        os.write(write, str(lost.pid).encode())
        os._exit(0)
    os.close(write)
    lost_pid = os.read(read, 32).decode()
    os.wait()
    with open(args.children + ".part", "w") as file:
        file.write(f"{child.pid} {lost_pid}")
    os.rename(args.children + ".part", args.children)
if args.silent_start:
    print("still loading weights", flush=True)
    signal.pause()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        pages = {"/health": b"", "/version": b'{"version": "0.0"}'}
        pages["/v1/models"] = json.dumps({"data": [{"id": args.model, "max_model_len": 4096}]}).encode()
        started = b"" if args.no_start_time else b"process_start_time_seconds %.3f\n" % began
        pages["/metrics"] = started + b'vllm:cache_config_info{block_size="16",num_gpu_blocks="64"} 1.0\n'
        if args.stuck:
            pages["/metrics"] += b"vllm:num_requests_running 1.0\nvllm:generation_tokens_total 7.0\n"
        body = pages.get(self.path)
        self.send_response(404 if body is None else 200)
        self.send_header("Content-Length", str(len(body or b"")))
        self.end_headers()
        self.wfile.write(body or b"")

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        print(self.path, body.decode(), flush=True)
        self.send_response(500 if args.stuck else 200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *ignored):
        pass


ThreadingHTTPServer.request_queue_size = 64
server = ThreadingHTTPServer(("127.0.0.1", args.port), Handler)
print("serving", flush=True)
server.serve_forever()
