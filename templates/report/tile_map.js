// The tile map of a mask: a canvas with a cell for each tile, and one with the scores of a tile.
const LARGEST = 420; // pixels of the map, at most

class TileMap {
  constructor(root, data) {
    this.data = data;
    this.cursor = [0, 0];
    root.innerHTML = `
      <p class="summary"></p>
      <div class="bar">
        <label>${data.packed ? "Sequence" : "Batch entry"} <select class="batch"></select></label>
        <label>Head <select class="head"></select></label>
      </div>
      <div class="maps">
        <figure><canvas class="map" tabindex="0" role="img"></canvas>
          <figcaption>Tiles: queries down, keys across. Arrow keys or the pointer choose one.</figcaption></figure>
        <figure><canvas class="scores" role="img"></canvas><figcaption class="zoom"></figcaption></figure>
        <div><ul class="kinds"></ul><p class="where" role="status"></p><ul class="notes"></ul></div>
      </div>`;
    this.part = (name) => root.querySelector(`.${name}`);
    this.fill();
    for (const name of ["batch", "head"]) this.part(name).addEventListener("change", () => this.draw());
    const map = this.part("map");
    map.addEventListener("pointermove", (event) => this.at(this.tileAt(event)));
    map.addEventListener("click", (event) => this.at(this.tileAt(event)));
    map.addEventListener("keydown", (event) => this.key(event));
    document.getElementById("theme").addEventListener("change", () => this.draw());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    this.draw();
  }

  fill() {
    const { data } = this;
    const [q, k] = data.tile;
    const number = (value) => value.toLocaleString("en");
    const predicted = data.computed === null ? "" : `; the products of ${number(data.computed)} are predicted`;
    const counted = data.counted === null ? "" : `; the emulator counted those of ${number(data.counted)}`;
    const kept = data.kept === null ? "" : ` The mask keeps ${(100 * data.kept).toFixed(1)} % of the scores.`;
    this.part("summary").textContent =
      `Tiles of ${q} queries x ${k} keys; a block owns ${data.owns}. ${number(data.visits)} of ` +
      `${number(data.tiles)} tiles are visited${predicted}${counted}.${kept}`;
    const pairs = data.heads.flatMap((head) => head.pairs);
    for (const [name, place] of [["batch", 0], ["head", 1]]) {
      const numbers = [...new Set(pairs.map((pair) => pair[place]))].sort((a, b) => a - b);
      for (const each of numbers) this.part(name).append(new Option(each, each));
    }
    this.swatches = {};
    for (const { code, style, text, count } of data.legend) {
      const item = document.createElement("li");
      const swatch = document.createElement("span");
      swatch.className = `swatch tile-${style}`;
      item.append(swatch, ` ${text}: ${count}`);
      this.part("kinds").append(item);
      this.swatches[code] = swatch;
    }
    for (const note of data.notes) this.part("notes").append(Object.assign(document.createElement("li"), { textContent: note }));
  }

  // Colours as the browser computes them for the legend, so that they follow the theme.
  colour(code) {
    return getComputedStyle(this.swatches[code]).backgroundColor;
  }

  get heads() {
    const [b, h] = [Number(this.part("batch").value), Number(this.part("head").value)];
    return this.data.heads.find((each) => each.pairs.some((pair) => pair[0] === b && pair[1] === h));
  }

  draw() {
    const heads = this.heads;
    const map = this.part("map");
    const { rows, columns, kinds } = heads;
    const size = Math.max(1, Math.min(32, Math.floor(LARGEST / Math.max(rows, columns))));
    this.size = size;
    [map.width, map.height] = [size * columns, size * rows];
    const gap = size > 4 ? 1 : 0;
    this.part("where").textContent = rows && columns ? "" : "This sequence has no tiles.";
    this.part("scores").parentElement.hidden = true;
    if (!rows || !columns) return;
    const context = map.getContext("2d");
    const colours = Object.fromEntries(this.data.legend.map(({ code }) => [code, this.colour(code)]));
    for (let row = 0; row < rows; row++) {
      for (let column = 0; column < columns; column++) {
        context.fillStyle = colours[kinds[row * columns + column]] ?? "red";
        context.fillRect(column * size, row * size, size - gap, size - gap);
      }
    }
    map.setAttribute("aria-label", `Tile map, ${rows} x ${columns} tiles: ${this.data.legend.map((e) => `${e.text}: ${e.count}`).join("; ")}`);
    this.at(this.cursor.map((place, i) => Math.min(place, [rows, columns][i] - 1)), false);
  }

  tileAt(event) {
    const box = this.part("map").getBoundingClientRect();
    const { rows, columns } = this.heads;
    const row = Math.floor(((event.clientY - box.top) / box.height) * rows);
    const column = Math.floor(((event.clientX - box.left) / box.width) * columns);
    return [Math.min(Math.max(row, 0), rows - 1), Math.min(Math.max(column, 0), columns - 1)];
  }

  key(event) {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    const { rows, columns } = this.heads;
    const [row, column] = [this.cursor[0] + step[0], this.cursor[1] + step[1]];
    this.at([Math.min(Math.max(row, 0), rows - 1), Math.min(Math.max(column, 0), columns - 1)]);
  }

  // Moves the cursor to a tile, and shows its scores.
  at([row, column], redraw = true) {
    const same = redraw && row === this.cursor[0] && column === this.cursor[1];
    if (same) return;
    this.cursor = [row, column];
    if (redraw) return this.draw();
    const { heads, size } = this;
    const context = this.part("map").getContext("2d");
    context.lineWidth = 2;
    context.strokeStyle = getComputedStyle(document.body).color;
    context.strokeRect(column * size + 1, row * size + 1, Math.max(1, size - 3), Math.max(1, size - 3));
    const [q, k] = this.data.tile;
    const ends = ([, length, before], tile, block) =>
      [Math.max(tile * block - before, 0), Math.min((tile + 1) * block - before, length)];
    const [q0, q1] = ends(heads.queries, row, q);
    const [k0, k1] = ends(heads.keys, column, k);
    const code = heads.kinds[row * heads.columns + column];
    const kind = this.data.legend.find((each) => String(each.code) === code);
    const count = this.zoom(heads, [q0, q1], [k0, k1]);
    this.part("where").textContent =
      `Tile (${row}, ${column}): queries ${q0 + heads.queries[0]} to ${q1 - 1 + heads.queries[0]}, keys ` +
      `${k0 + heads.keys[0]} to ${k1 - 1 + heads.keys[0]}; ${kind?.text ?? "unknown"}` +
      (count === undefined ? "." : `; ${count.toLocaleString("en")} of ${((q1 - q0) * (k1 - k0)).toLocaleString("en")} scores kept.`);
  }

  // Draws the scores of a tile; returns how many are kept, undefined where the page has none.
  zoom(heads, [q0, q1], [k0, k1]) {
    const canvas = this.part("scores");
    canvas.parentElement.hidden = !heads.scores;
    if (!heads.scores) return undefined;
    heads.bytes ??= Uint8Array.from(atob(heads.scores), (letter) => letter.charCodeAt(0));
    const [rows, columns] = [q1 - q0, k1 - k0];
    const size = Math.max(1, Math.floor(LARGEST / 1.5 / Math.max(rows, columns)));
    [canvas.width, canvas.height] = [size * columns, size * rows];
    const context = canvas.getContext("2d");
    const [kept, masked] = [this.colour(1), this.colour(0)];
    let count = 0;
    for (let row = 0; row < rows; row++) {
      for (let column = 0; column < columns; column++) {
        const bit = (q0 + row) * heads.keys[1] + k0 + column;
        const on = (heads.bytes[bit >> 3] >> (7 - (bit & 7))) & 1;
        count += on;
        context.fillStyle = on ? kept : masked;
        context.fillRect(column * size, row * size, size, size);
      }
    }
    this.part("zoom").textContent = "The scores of the chosen tile: kept and masked.";
    canvas.setAttribute("aria-label", `${count} of ${rows * columns} scores of the tile are kept`);
    return count;
  }
}
