"""`python3 -I -S healthy.py PORT PATH`: exit status 0 if a GET there answers 200, else 1. Only what starts in 20 ms:
it runs every few seconds in every container."""

import socket
import sys


def main(port: int, path: str) -> int:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=3.0) as s:
            s.sendall(f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
            answer = s.recv(4096)
    except OSError as e:
        print(f"port {port}: {e}")
        return 1
    print(answer.decode("latin-1"))
    return int(not answer.split(b"\r\n")[0].partition(b" ")[2].startswith(b"200"))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
