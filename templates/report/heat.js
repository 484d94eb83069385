// The heat map of the texts: the counts of one metric in the margin, and as the colour of a line.
const STATIC = "static";

class Heat {
  constructor(root, panes, data) {
    this.root = root;
    this.panes = panes;
    this.data = data;
    this.metric = root.querySelector(".metric");
    this.outer = root.querySelector(".outer");
    const names = Object.keys(data.heat).map((name) => [name, data.metrics[name]]);
    if (data.texts.sass.lines.length) names.push([STATIC, "machine instructions (static)"]);
    for (const [name, words] of names) this.metric.append(new Option(words, name));
    if (!names.length) this.metric.append(new Option("nothing was counted", ""));
    for (const control of [this.metric, this.outer]) control.addEventListener("change", () => this.apply());
    this.apply();
  }

  // Counts of the chosen metric by line, of CUDA and of PTX.
  counts() {
    if (this.metric.value === STATIC) return { cuda: this.data.sassOfLine, ptx: {} };
    const heat = this.data.heat[this.metric.value];
    if (!heat) return { cuda: {}, ptx: {} };
    return { cuda: this.outer.checked ? heat.outer : heat.cuda, ptx: heat.ptx };
  }

  apply() {
    const { cuda, ptx } = this.counts();
    this.paint(this.panes.cuda, (index) => cuda[index + 1] ?? 0, true);
    this.paint(this.panes.ptx, (index) => ptx[index + 1] ?? 0, true);
    const links = this.panes.sass.text.links;
    this.paint(this.panes.sass, (index) => this.data.sassOfLine[links[index]] ?? 0, false);
    const most = Math.max(0, ...Object.entries(cuda).map(([line, count]) => (Number(line) ? count : 0)));
    const total = Object.values(cuda).reduce((sum, count) => sum + count, 0);
    const without = cuda[0] ? `, ${short(cuda[0])} of them without a line` : "";
    this.root.querySelector(".scale-text").textContent = this.metric.value
      ? `0 to ${short(most)} in a line of CUDA, ${total.toLocaleString("en")} in all${without}`
      : "";
    this.total = total;
  }

  paint(pane, countOf, shown) {
    let most = 0;
    const counts = pane.rows.map((_, index) => {
      const count = countOf(index);
      if (count > most) most = count;
      return count;
    });
    pane.rows.forEach((row, index) => {
      const count = counts[index];
      if (count) row.style.setProperty("--h", Math.sqrt(count / most).toFixed(3));
      else row.style.removeProperty("--h");
      if (count && shown) row.dataset.c = short(count);
      else delete row.dataset.c;
    });
  }

  // The count of a line in words; "" where it has none.
  words(kind, index) {
    const counts = this.counts()[kind];
    const count = counts?.[index + 1];
    if (!count) return "";
    const share = this.total ? ` (${((100 * count) / this.total).toFixed(1)} %)` : "";
    return `${count.toLocaleString("en")} ${this.metric.selectedOptions[0].textContent}${share}`;
  }
}
