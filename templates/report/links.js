// The links of the four texts of a kernel. A line of PTX or SASS names its line of CUDA, and the
// line of the kernel at which that code is inlined; a mod in Python names the functions made of it.
class Links {
  constructor(panes, mods) {
    this.panes = panes;
    this.mods = mods;
    this.own = {};
    this.outer = {};
    for (const kind of ["ptx", "sass"]) {
      this.own[kind] = this.byLine(panes[kind].text.links);
      this.outer[kind] = this.byLine(panes[kind].text.outer);
    }
    this.marked = { hover: [], pin: [] };
  }

  byLine(links) {
    const found = new Map();
    links.forEach((line, index) => {
      if (!line) return;
      if (!found.has(line)) found.set(line, []);
      found.get(line).push(index);
    });
    return found;
  }

  // The lines of CUDA that a line is linked with: its own, and the lines of the kernel around it.
  linesOf(kind, index) {
    const pane = this.panes[kind];
    if (kind === "cuda") return { own: new Set([index + 1]), outer: new Set() };
    if (kind === "python") {
      const number = pane.numberOf(index);
      const mods = this.mods.filter((mod) => mod.python.includes(number));
      return { own: new Set(mods.flatMap((mod) => mod.cuda)), outer: new Set() };
    }
    const [own, outer] = [pane.text.links[index], pane.text.outer[index]];
    return { own: new Set(own ? [own] : []), outer: new Set(outer && outer !== own ? [outer] : []) };
  }

  // All linked lines by text: those with the same line of CUDA, and those that are inlined there.
  of(kind, index) {
    const { own, outer } = this.linesOf(kind, index);
    const found = { linked: {}, via: {} };
    found.linked.cuda = [...own].map((line) => line - 1);
    found.via.cuda = [...outer].map((line) => line - 1);
    for (const text of ["ptx", "sass"]) {
      found.linked[text] = [...own].flatMap((line) => this.own[text].get(line) ?? []);
      const inside = kind === "cuda" || kind === "python";
      found.via[text] = inside ? [...own].flatMap((line) => this.outer[text].get(line) ?? []) : [];
    }
    const numbers = new Set();
    for (const mod of this.mods) {
      if (mod.cuda.some((line) => own.has(line) || outer.has(line))) mod.python.forEach((n) => numbers.add(n));
    }
    found.linked.python = [];
    if (kind !== "python") {
      this.panes.python.rows.forEach((_, i) => {
        if (numbers.has(this.panes.python.numberOf(i))) found.linked.python.push(i);
      });
    }
    return found;
  }

  clear(layer) {
    for (const [row, name] of this.marked[layer]) row.classList.remove(name);
    this.marked[layer] = [];
  }

  // Marks a line and all lines that it is linked with, in the layer "hover" or "pin".
  show(kind, index, layer) {
    this.clear(layer);
    const found = this.of(kind, index);
    const prefix = layer === "hover" ? "hover-" : "";
    const mark = (row, name) => {
      if (!row) return;
      row.classList.add(name);
      this.marked[layer].push([row, name]);
    };
    for (const name of ["via", "linked"]) {
      for (const [text, indices] of Object.entries(found[name])) {
        for (const each of indices) mark(this.panes[text].rows[each], prefix + name);
      }
    }
    mark(this.panes[kind].rows[index], layer === "hover" ? "hover-linked" : "here");
    return found;
  }
}
