"""Certificates for tests, made by the distribution's openssl when a test runs."""

import os
import subprocess

OPENSSL_SECONDS = 60


def _openssl(*arguments):
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=OPENSSL_SECONDS)


class Authority:
    """A root in a folder. `roots` is its certificate's path."""

    def __init__(self, folder):
        self.folder = folder
        self.roots, self._key = self._paths("root")
        _openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1",
                 "-subj", "/CN=root", "-keyout", self._key, "-out", self.roots)

    def _paths(self, name):
        return os.path.join(self.folder, name + ".crt"), os.path.join(self.folder, name + ".key")

    def issue(self, name, uri):
        """(certificate, key): the paths of both, for `uri`, localhost and 127.0.0.1."""
        certificate, key = self._paths(name)
        request, extensions = certificate + ".req", certificate + ".ext"
        with open(extensions, "w") as file:
            file.write("basicConstraints=critical,CA:FALSE\nextendedKeyUsage=serverAuth,clientAuth\n"
                       "subjectAltName=URI:%s,DNS:localhost,IP:127.0.0.1\n" % uri)
        _openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=member",
                 "-keyout", key, "-out", request)
        _openssl("x509", "-req", "-in", request, "-CA", self.roots, "-CAkey", self._key, "-CAcreateserial", "-days", "1",
                 "-extfile", extensions, "-out", certificate)
        return certificate, key
