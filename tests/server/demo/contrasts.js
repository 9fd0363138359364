// Text whose colour stands out from what it stands on by less than 4.5 to 1.
() => {
  const TEXTS = "h1, h2, h3, p, label, dt, dd, th, td, button:not(:disabled), .said, output, figcaption, code, del";
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, at) => sum + c * [0.2126, 0.7152, 0.0722][at], 0);
  const under = (node) => {
    for (; node; node = node.parentElement) {
      const color = rgba(getComputedStyle(node).backgroundColor);
      if (color[3] === 255) return color;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const node of document.querySelectorAll(TEXTS)) {
    if (!node.textContent.trim() || !node.offsetParent) continue;
    const { color, opacity } = getComputedStyle(node);
    const ground = under(node);
    const seen = rgba(color).map((part, at) => opacity * part + (1 - opacity) * ground[at]);
    const [first, second] = [light(seen), light(ground)].sort((a, b) => b - a);
    const ratio = (first + 0.05) / (second + 0.05);
    if (ratio < 4.5) poor.push(`${node.tagName}.${node.className} ${node.textContent.slice(0, 20)}: ${ratio.toFixed(2)}`);
  }
  return [...new Set(poor)];
}
