"""Measures how soon the chat page is usable in a browser with a slow connection.

    python bench/page_load.py --save

Chromium's network emulation limits the rate and adds latency to each request. The page is usable
once the composer takes text and the model is known; Markdown and its libraries load later.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from harness import print_table, save
from playwright.sync_api import sync_playwright

BROWSERS = ("/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome")


def measure(url: str, kbit: float, latency: float) -> dict[str, Any]:
    """Seconds until the page is usable, and until everything has loaded."""
    executable = next(path for path in BROWSERS if Path(path).exists())
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-background-networking"]
        browser = playwright.chromium.launch(executable_path=executable, args=arguments)
        page = browser.new_page()
        sizes: list[int] = []
        session = page.context.new_cdp_session(page)
        session.send("Network.enable")
        session.on(
            "Network.loadingFinished", lambda event: sizes.append(event["encodedDataLength"])
        )
        rate = kbit * 1000 / 8
        session.send(
            "Network.emulateNetworkConditions",
            {
                "offline": False, "latency": latency,
                "downloadThroughput": rate, "uploadThroughput": rate,
            },
        )  # fmt: skip
        begin = time.perf_counter()
        page.goto(url, wait_until="commit")
        # The model's name arrives with the server's first answer, after the page's own code.
        page.wait_for_function("() => document.querySelector('#model')?.value")
        usable = time.perf_counter() - begin
        num_requests, num_bytes = len(sizes), sum(sizes)
        page.wait_for_load_state("networkidle")
        whole = time.perf_counter() - begin
        browser.close()
    return {
        "kbit_per_s": kbit, "latency_ms": latency, "usable_s": usable, "whole_s": whole,
        "requests_until_usable": num_requests, "bytes_until_usable": num_bytes,
        "bytes": sum(sizes),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000/")
    parser.add_argument("--kbit", type=float, default=400)
    parser.add_argument("--latency", type=float, default=100, help="milliseconds of each request")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="write bench/results/page-load.json")
    options = parser.parse_args()
    rows = [measure(options.url, options.kbit, options.latency) for _ in range(options.repeat)]
    print_table(
        list(rows[0]),
        [
            [f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()]
            for row in rows
        ],
    )
    if options.save:
        save("page-load", {"results": rows})


if __name__ == "__main__":
    main()
