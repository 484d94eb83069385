class TileMap {
  constructor(root, data) {
    this.root = root;
    this.data = data;
  }
}
