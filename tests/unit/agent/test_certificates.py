"""Certificates that are read late: whom a client trusts is the same. In processes of their own, which it is done to."""

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PROGRAM = """
    import asyncio, socket, ssl, sys, threading
    from strop.agent.certificates import defer_certificates

    defer_certificates()
    defer_certificates()
    trusted = sys.argv[1]

    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(trusted)
    listening = socket.create_server(("127.0.0.1", 0))

    def serve():
        while True:
            connection, _ = listening.accept()
            try:
                with server_side.wrap_socket(connection, server_side=True) as tls:
                    tls.sendall(b"hello")
            except (ssl.SSLError, OSError):
                pass

    threading.Thread(target=serve, daemon=True).start()

    def ask(context):
        with socket.create_connection(listening.getsockname()) as plain:
            with context.wrap_socket(plain, server_hostname="localhost") as tls:
                return tls.recv(5).decode()

    async def ask_async(context):
        reader, writer = await asyncio.open_connection(
            *listening.getsockname(), ssl=context, server_hostname="localhost"
        )
        said = await reader.read(5)
        writer.transport.abort()
        return said.decode()

    def refused(context):
        try:
            ask(context)
        except ssl.SSLCertVerificationError:
            return True

    def make(**given):
        return ssl.create_default_context(**given)

    context = make(cafile=trusted)
    assert ask(context) == ask(context) == "hello"
    assert asyncio.run(ask_async(make(cafile=trusted))) == "hello"
    assert make(cafile=trusted).cert_store_stats()["x509"] == 1
    assert len(make(cafile=trusted).get_ca_certs()) >= 0
    assert refused(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    import certifi
    assert refused(make(cafile=certifi.where()))
    both = make(cafile=certifi.where())
    both.load_verify_locations(trusted)
    assert ask(both) == "hello"
    assert ask(make(cadata=open(trusted).read().partition("-----END PRIVATE KEY-----")[2])) == "hello"
    try:
        make(cafile="/no/such/file")
        raise SystemExit("a missing file is not told of")
    except FileNotFoundError:
        pass
    import openai
    with openai.OpenAI(base_url="http://127.0.0.1:9", api_key="k"):
        pass
    print("as before")
"""


def test_who_is_trusted_is_the_same(tmp_path: Path):
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    key, certificate, both = tmp_path / "key.pem", tmp_path / "certificate.pem", tmp_path / "both.pem"
    make = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "1",
        "-keyout",
        key,
        "-out",
        certificate,
    ]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*make, *names], check=True, capture_output=True)
    both.write_text(key.read_text() + certificate.read_text())
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), both], capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["as", "before"], done.stderr
