// The page: which kernel is shown, and what happens in its texts when a person points and chooses.
const NAMES = { python: "Python", cuda: "CUDA", ptx: "PTX", sass: "SASS" };

class Kernel {
  constructor(article, data) {
    this.article = article;
    const code = article.querySelector(".code");
    this.panes = {};
    for (const root of code.querySelectorAll(".pane")) {
      this.panes[root.dataset.kind] = new TextPane(root, data.texts[root.dataset.kind]);
    }
    this.links = new Links(this.panes, data.mods);
    this.heat = new Heat(code, this.panes, data);
    this.status = code.querySelector(".status");
    for (const pane of Object.values(this.panes)) this.listen(pane);
    const without = [];
    for (const box of code.querySelectorAll(".show")) {
      const pane = this.panes[box.value];
      box.disabled = pane.rows.length === 0;
      box.checked = !box.disabled;
      if (box.disabled) without.push(`${NAMES[box.value]} is not shown: ${pane.text.note || "there is none."}`);
      box.addEventListener("change", () => {
        pane.root.hidden = !box.checked;
      });
    }
    const note = code.querySelector(".without");
    note.hidden = !without.length;
    note.textContent = without.join(" ");
    this.open(data.mods);
    for (const button of article.querySelectorAll(".to-line")) {
      button.addEventListener("click", () => {
        code.scrollIntoView();
        this.choose(this.panes.cuda, Number(button.dataset.line) - 1);
      });
    }
    const map = article.querySelector(".tile-map");
    if (map) new TileMap(map, data.tileMap);
  }

  // Brings the first mod and the line with the largest count in view.
  open(mods) {
    const { python, cuda, ptx } = this.panes;
    const first = Math.min(...mods.flatMap((mod) => mod.python));
    if (Number.isFinite(first)) python.scrollTo(python.rowOf(first));
    const counts = this.heat.counts();
    for (const [pane, of] of [[cuda, counts.cuda], [ptx, counts.ptx]]) {
      const lines = Object.entries(of ?? {}).filter(([line, count]) => Number(line) && count);
      if (lines.length) pane.scrollTo(pane.rows[lines.reduce((a, b) => (b[1] > a[1] ? b : a))[0] - 1]);
    }
  }

  listen(pane) {
    pane.list.addEventListener("pointerover", (event) => {
      const index = pane.indexAt(event);
      if (index !== undefined && event.pointerType !== "touch") this.links.show(pane.kind, index, "hover");
    });
    pane.list.addEventListener("pointerleave", () => this.links.clear("hover"));
    pane.list.addEventListener("click", (event) => {
      const index = pane.indexAt(event);
      if (index !== undefined) this.choose(pane, index);
    });
    pane.list.addEventListener("keydown", (event) => this.key(pane, event));
    const field = pane.root.querySelector("input");
    field.addEventListener("input", () => {
      const first = pane.search(field.value)[0];
      if (first !== undefined) pane.scrollTo(pane.rows[first]);
    });
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter") return;
      event.preventDefault();
      const index = pane.next(event.shiftKey ? -1 : 1);
      if (index !== undefined) this.choose(pane, index);
    });
  }

  key(pane, event) {
    const page = Math.max(1, Math.floor(pane.list.clientHeight / 18) - 1);
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (event.key === "Escape") {
      this.links.clear("pin");
      pane.choose(undefined);
      this.status.textContent = "No line is chosen.";
    } else if (event.key in steps) {
      event.preventDefault();
      const index = pane.chosen === undefined ? 0 : pane.chosen + steps[event.key];
      this.choose(pane, Math.min(Math.max(index, 0), pane.rows.length - 1));
    }
  }

  // Chooses a line: marks what it is linked with, and brings the first such line of each text in view.
  choose(pane, index) {
    const { linked, via } = this.links.show(pane.kind, index, "pin");
    pane.choose(index);
    pane.scrollTo(pane.rows[index]);
    const words = [];
    for (const [kind, other] of Object.entries(this.panes)) {
      if (kind === pane.kind) continue;
      const lines = linked[kind].length ? linked[kind] : (via[kind] ?? []);
      if (lines.length) other.scrollTo(other.rows[lines[0]]);
      const inlined = via[kind]?.filter((line) => !linked[kind].includes(line)).length;
      if (linked[kind].length) words.push(plural(linked[kind].length, `line`) + ` of ${NAMES[kind]}`);
      if (inlined) words.push(`${plural(inlined, "line")} of ${NAMES[kind]} by inlining`);
    }
    const count = this.heat.words(pane.kind, index);
    const links = words.length ? `linked with ${words.join(", ")}` : "no other line is linked with it";
    this.status.textContent = `${NAMES[pane.kind]} line ${pane.numberOf(index)}: ${count ? `${count}; ` : ""}${links}.`;
  }
}

// A side: one call. Its kernels are made when they are first shown.
class Side {
  constructor(root, kernels, metrics) {
    this.root = root;
    this.articles = [...root.querySelectorAll(".kernel")];
    this.kernels = kernels;
    this.metrics = metrics;
    this.made = [];
    this.select = root.querySelector(".kernel-select");
    for (const link of root.querySelectorAll("[data-section]")) {
      link.addEventListener("click", (event) => {
        event.preventDefault();
        const section = this.articles[this.shown].querySelector(`[data-name=${link.dataset.section}]`);
        section.scrollIntoView();
        section.tabIndex = -1;
        section.focus({ preventScroll: true });
      });
    }
  }

  show(index) {
    this.shown = index;
    this.select.value = index;
    this.articles.forEach((article, place) => (article.hidden = place !== index));
    if (this.articles.length) this.made[index] ??= new Kernel(this.articles[index], { ...this.kernels[index], metrics: this.metrics });
  }

  // Shows the kernel of the same role, if this side has it.
  follow(title) {
    const place = this.articles.findIndex((article) => article.dataset.title === title);
    if (place >= 0) this.show(place);
  }
}

async function start() {
  const theme = document.getElementById("theme");
  theme.addEventListener("change", () => (document.documentElement.style.colorScheme = theme.value));
  const data = await readData();
  const roots = [...document.querySelectorAll(".side")];
  const sides = roots.map((root, place) => new Side(root, data.sides[place], data.metrics));
  for (const side of sides) {
    side.select.addEventListener("change", () => {
      side.show(Number(side.select.value));
      const title = side.articles[side.shown].dataset.title;
      for (const other of sides) if (other !== side) other.follow(title);
    });
    side.show(Math.max(0, side.articles.findIndex((article) => article.dataset.title === "forward")));
  }
  document.documentElement.dataset.ready = "true";
}

start().catch((error) => {
  const failure = document.getElementById("failure");
  failure.hidden = false;
  failure.textContent = `The texts cannot be shown: ${error.message}. A browser with DecompressionStream is needed.`;
  console.error(error);
});
