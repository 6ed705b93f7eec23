"""PDF files for tests, written byte by byte or changed by pypdf."""

from __future__ import annotations

import base64
import io


def pdf(*pages: str) -> bytes:
    """A PDF with one line of text on each page; "" leaves a page empty."""
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(len(pages)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for i, text in enumerate(pages):
        shown = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET" if text else ""
        objects += [
            "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Resources "
            f"<< /Font << /F1 3 0 R >> >> /Contents {5 + 2 * i} 0 R >>",
            f"<< /Length {len(shown)} >>\nstream\n{shown}\nendstream",
        ]
    content, places = b"%PDF-1.7\n", []
    for number, text in enumerate(objects, start=1):
        places.append(len(content))
        content += f"{number} 0 obj\n{text}\nendobj\n".encode()
    start, count = len(content), len(objects) + 1
    rows = "".join(f"{place:010d} 00000 n \n" for place in places)
    content += f"xref\n0 {count}\n0000000000 65535 f \n{rows}".encode()
    return content + (
        f"trailer << /Size {count} /Root 1 0 R >>\nstartxref\n{start}\n%%EOF\n".encode()
    )


def encrypted(content: bytes, password: str) -> bytes:
    """The same PDF with a password ("": no password, but restrictions)."""
    from pypdf import PdfWriter

    writer = PdfWriter(clone_from=io.BytesIO(content))
    writer.encrypt(password, owner_password="owner", algorithm="RC4-128")
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


def in_base64(content: bytes) -> str:
    return base64.b64encode(content).decode()
