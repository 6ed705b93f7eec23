"""The chat page of a server of several models: their states, and the choice among them."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Route, expect
from support.page_helpers import Visitor, answered, fake, in_browser, send


class Models:
    """Answers for the page in place of a router: what it shows follows from this alone."""

    def __init__(self) -> None:
        self.states: dict[str, dict[str, Any]] = {
            "big": {"value": "loaded"}, "small": {"value": "unloaded"},
        }  # fmt: skip
        self.asked: list[str] = []

    def models(self, route: Route) -> None:
        data = [
            {"id": name, "object": "model", "root": name, "parent": None, "status": state}
            for name, state in self.states.items()
        ]
        alias = {**data[0], "id": "alias"}
        route.fulfill(json={"object": "list", "data": [*data, alias]})

    def info(self, route: Route) -> None:
        name = route.request.url.partition("?model=")[2]
        self.asked.append(name)
        if not name:
            route.fulfill(json={"status": "ready", "config": {}, "models": list(self.states)})
            return
        usage = {"num_usable_blocks": 100, "num_used_blocks": 25, "num_cached_blocks": 0}
        stats = {"num_running": 1, "num_waiting": 0, "usage": usage}
        route.fulfill(json={"status": "ready", "config": {}, "stats": stats})

    def serve(self, visitor: Visitor) -> None:
        visitor.context.route("**/v1/models", self.models)
        visitor.context.route("**/server_info*", self.info)


@in_browser
def test_the_list_shows_states_and_a_message_goes_to_the_chosen_model(visitor: Visitor) -> None:
    models = Models()
    models.serve(visitor)
    page = visitor.open(fakes=True)
    options = page.locator("#model option")
    expect(options).to_have_text(["big", "small (not loaded)"])
    expect(page.locator("#load")).to_have_text("1 running, 0 waiting")
    page.locator("#model").select_option("small")
    send(page, "One")
    assert fake(page, "answer.body")["model"] == "small"
    models.states["small"] = {"value": "loading"}
    expect(options).to_have_text(["big", "small (loading…)"])
    expect(page.locator("#banners, body")).to_contain_text(["Loading the model"])
    fake(page, "answer.end()")
    answered(page)
    models.states["small"] = {"value": "loaded"}
    expect(options).to_have_text(["big", "small"])
    expect(page.locator("#model")).to_have_value("small")
    models.states["big"] = {"value": "unloaded", "failed": True, "reason": "no room"}
    expect(options).to_have_text(["big (failed)", "small"])
    expect(options.first).to_have_attribute("title", "failed: no room")
    page.reload()
    expect(page.locator("#model")).to_have_value("small")
    # The page does not ask for the state of an unloaded model, which would load it.
    assert set(models.asked) == {"", "big", "small"}
    assert models.asked[models.asked.index("small") :].count("big") == 0
