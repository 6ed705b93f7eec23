// The scroll position: the end of the messages stays in view until the user moves up.

import { state } from "./state.js";

const $ = (id) => document.getElementById(id);
let scrolling = null; // frame that scrolls to the end
let top = 0;

// Once for all that changes before the next frame: reading a height lays out the page.
export function scrollSoon() {
  scrolling ??= requestAnimationFrame(() => {
    scrolling = null;
    scrollToEnd();
  });
}

export function scrollToEnd() {
  const box = $("scroll");
  if (state.follows) box.scrollTop = box.scrollHeight;
  $("to-end").hidden = box.scrollHeight - box.scrollTop - box.clientHeight < 80;
}

$("to-end").addEventListener("click", () => {
  state.follows = true;
  scrollToEnd();
});
$("scroll").addEventListener("scroll", () => {
  const box = $("scroll");
  const isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 80;
  // Only the user moves up; what grows below does not.
  if (isAtEnd) state.follows = true;
  else if (box.scrollTop < top - 1) state.follows = false;
  top = box.scrollTop;
  $("to-end").hidden = isAtEnd;
}, { passive: true });
// (Pictures, maths and fonts come late.)
const sizes = new ResizeObserver(scrollToEnd);
sizes.observe($("messages"));
sizes.observe($("scroll"));
