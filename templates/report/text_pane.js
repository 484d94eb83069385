// One text of a kernel: its lines, a search, and the line that was chosen in it.
const CHUNK = 100; // lines that the browser lays out together, when they come into view

const WORDS = {
  python: "and|as|class|def|elif|else|False|for|from|if|import|in|is|lambda|None|not|or|return|True|while|with",
  cuda: "asm|auto|bool|break|const|constexpr|continue|else|extern|false|float|for|if|int|int64|long|return|short|sizeof|static_assert|struct|template|true|typedef|typename|unsigned|void|volatile|while|__\\w+__",
  ptx: "\\.[a-z]\\w*|@!?%p\\d+",
  sass: "@!?U?P\\w+|\\.[A-Z]\\w*",
};
const TOKENS = Object.fromEntries(Object.entries(WORDS).map(([kind, words]) => [kind, new RegExp(
  `(?<note>${kind === "python" ? "#" : "//"}.*|/\\*.*?\\*/)|(?<text>"[^"]*"|'[^']*')|` +
  `(?<word>${/^\\./.test(words) || kind === "sass" ? `(?:${words})` : `\\b(?:${words})\\b`})|(?<number>\\b\\d[\\w.]*)`, "g")]));

// A line with its comments, strings, words of the language and numbers in colour.
function coloured(line, kind) {
  const whole = document.createElement("span");
  let end = 0;
  for (const found of line.matchAll(TOKENS[kind])) {
    whole.append(line.slice(end, found.index));
    const part = whole.appendChild(document.createElement("span"));
    part.className = `is-${Object.keys(found.groups).find((name) => found.groups[name] !== undefined)}`;
    part.textContent = found[0];
    end = found.index + found[0].length;
  }
  whole.append(line.slice(end));
  return whole;
}

class TextPane {
  constructor(root, text) {
    this.root = root;
    this.kind = root.dataset.kind;
    this.text = text;
    this.list = root.querySelector(".lines");
    this.rows = [];
    this.matches = [];
    this.current = -1;
    root.querySelector("h4 small").textContent = text.title;
    const note = root.querySelector(".note");
    note.hidden = !text.note;
    note.textContent = text.note;
    this.fill();
  }

  numberOf(index) {
    return this.text.numbers ? this.text.numbers[index] : index + 1;
  }

  fill() {
    const whole = document.createDocumentFragment();
    let chunk;
    let inString = false; // between triple quotes
    this.text.lines.forEach((line, index) => {
      if (index % CHUNK === 0) {
        chunk = whole.appendChild(document.createElement("div"));
        chunk.className = "chunk";
        const lines = Math.min(CHUNK, this.text.lines.length - index);
        chunk.style.containIntrinsicHeight = `auto ${18 * lines}px`;
      }
      const row = document.createElement("div");
      row.className = /^\s*(\.loc|\/\/|#)/.test(line) ? "l dim" : "l";
      row.dataset.n = this.numberOf(index);
      row.dataset.i = index;
      row.setAttribute("role", "option");
      const quotes = this.kind === "python" ? line.split('"""').length - 1 : 0;
      if (quotes || inString) row.append(line || " ");
      else row.append(coloured(line || " ", this.kind));
      row.classList.toggle("is-text", quotes > 0 || inString);
      inString = quotes % 2 ? !inString : inString;
      this.rows.push(row);
      chunk.append(row);
    });
    this.root.hidden = this.rows.length === 0; // why is said above the texts
    this.list.append(whole);
  }

  rowOf(number) {
    const index = this.text.numbers ? this.text.numbers.indexOf(number) : number - 1;
    return this.rows[index];
  }

  // The index of the line that an event happened on; undefined between lines.
  indexAt(event) {
    const row = event.target.closest(".l");
    return row ? Number(row.dataset.i) : undefined;
  }

  scrollTo(row) {
    if (!row) return;
    const [box, list] = [row.getBoundingClientRect(), this.list.getBoundingClientRect()];
    if (box.top < list.top || box.bottom > list.bottom) {
      this.list.scrollTop += box.top - list.top - list.height / 2;
      // Chunks above were estimated until they came into view.
      const after = row.getBoundingClientRect();
      this.list.scrollTop += after.top - list.top - list.height / 2;
    }
  }

  choose(index) {
    const before = this.list.querySelector("[aria-selected]");
    if (before) {
      before.removeAttribute("aria-selected");
      before.removeAttribute("id");
    }
    this.list.removeAttribute("aria-activedescendant");
    this.chosen = index;
    const row = this.rows[index];
    if (!row) return;
    row.setAttribute("aria-selected", "true");
    row.id = `chosen-${this.list.getAttribute("aria-label").replace(/\W+/g, "-")}`;
    this.list.setAttribute("aria-activedescendant", row.id);
  }

  // Marks the lines that contain a word; returns them.
  search(word) {
    for (const index of this.matches) this.rows[index].classList.remove("match");
    const wanted = word.trim().toLowerCase();
    this.matches = [];
    this.current = -1;
    if (wanted) {
      this.text.lines.forEach((line, index) => {
        if (line.toLowerCase().includes(wanted)) this.matches.push(index);
      });
    }
    for (const index of this.matches) this.rows[index].classList.add("match");
    this.tell(wanted);
    return this.matches;
  }

  // The index of the next match, or of the one before.
  next(step) {
    if (!this.matches.length) return undefined;
    const start = this.current < 0 && step < 0 ? 0 : this.current;
    this.current = (start + step + this.matches.length) % this.matches.length;
    this.tell("found");
    return this.matches[this.current];
  }

  tell(wanted) {
    const found = this.matches.length;
    const text = this.current >= 0 ? `${this.current + 1} of ${found}` : plural(found, "line");
    this.root.querySelector("output").textContent = wanted ? text : "";
  }
}
