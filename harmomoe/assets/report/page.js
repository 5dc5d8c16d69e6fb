"use strict";
(async () => {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const at = (id) => document.getElementById(id);
  const run = read("data");
  const plots = read("plots");
  const item = { docid: "report", roots: plots.roots, root_ids: Object.keys(plots.roots) };
  await Bokeh.embed.embed_items({ report: plots.doc }, [item]);
  const model = (name) => Bokeh.documents[0].get_model_by_name(name);

  // Whatever comes from data becomes a text node, never HTML.
  const make = (tag, text, ...classes) => {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    made.classList.add(...classes);
    return made;
  };
  const sampleOf = (sample) => {
    if (run.texts) return make("p", sample, "words");
    const image = make("img");
    image.src = sample;
    image.alt = "";
    return image;
  };
  const choice = (type, text, colour, checked, changed) => {
    const label = make("label");
    const input = make("input");
    const dot = make("i", undefined, "dot");
    Object.assign(input, { type, checked, name: type });
    dot.style.background = colour;
    input.addEventListener("change", () => changed(input.checked));
    label.append(input, dot, text);
    return label;
  };
  const options = (id, names, changed) => {
    at(id).append(...names.map((name) => make("option", name)));
    at(id).addEventListener("change", () => changed(at(id).selectedIndex));
  };

  // ---- the map
  const points = run.points;
  let client = run.clients[0];
  let way = run.selection;
  const told = (index) => {
    const place = `${points.origin[index]}, row ${points.row[index]}`;
    const relevance = client.relevance[index];
    return relevance === undefined ? place : `${place}; relevance ${relevance.toFixed(2)}`;
  };
  const columns = (indices) => ({
    x: indices.map((i) => points.x[i]),
    y: indices.map((i) => points.y[i]),
    label: indices.map((i) => points.label[i]),
    sample: indices.map((i) => points.sample[i]),
    note: indices.map(told),
    index: indices,
  });
  const draw = () => {
    const chosen = client.proxies[way];
    const taken = new Set(chosen);
    const pool = [...Array(run.pool).keys()].filter((i) => !taken.has(i));
    for (const [name, indices] of [["pool", pool], ["private", client.private], ["proxies", chosen]]) {
      const source = model(`${name}-source`);
      source.selected.indices = [];
      source.data = columns(indices);
    }
    model("proxies").glyph.fill_color = run.colours[way];
  };
  const keep = (index) => {
    const ways = Object.keys(run.ways).filter((name) => client.proxies[name].includes(index));
    const card = [sampleOf(points.sample[index]), make("p", points.label[index])];
    card[1].style.fontWeight = 600;
    card.push(make("p", told(index), "quiet"));
    if (ways.length) {
      const names = ways.map((name) => run.ways[name]).join(", ");
      card.push(make("p", `Proxy of ${client.name}: ${names}.`));
    }
    at("chosen").replaceChildren(...card);
  };
  for (const name of ["pool", "private", "proxies"]) {
    const source = model(`${name}-source`);
    source.selected.properties.indices.change.connect(() => {
      const [first] = source.selected.indices;
      if (first !== undefined) keep(source.data.index[first]);
    });
  }
  for (const name of ["pool", "private"]) {
    const box = at(`show-${name}`);
    box.addEventListener("change", () => (model(name).visible = box.checked));
  }
  options("client", run.clients.map((one) => one.name), (index) => {
    client = run.clients[index];
    draw();
  });
  for (const [name, title] of Object.entries(run.ways)) {
    const changed = () => {
      way = name;
      draw();
    };
    at("ways").append(choice("radio", `proxies ${title}`, run.colours[name], name === way, changed));
  }
  draw();

  // ---- the routing of a test sample
  const ask = (sample, button) => {
    for (const other of at("samples").children) other.setAttribute("aria-pressed", other === button);
    const card = [sampleOf(sample.sample), make("p", sample.label)];
    card[1].style.fontWeight = 600;
    if (sample.answer !== null) {
      const right = sample.answer === sample.label;
      const said = `${right ? "✓" : "✗"} HarmoMoE says: ${sample.answer}`;
      card.push(make("p", said, right ? "right" : "wrong"));
    }
    card.push(make("p", `${sample.domain}, ${sample.split} row ${sample.row}`, "quiet"));
    at("asked").classList.toggle("pictured", !run.texts);
    at("asked").replaceChildren(...card);
    const share = sample.share.flat();
    const source = model("routing-source");
    const ink = share.map((value) => (value < 0.6 ? "white" : "black"));
    const text = share.map((value) => (100 * value).toFixed(0));
    source.data = { ...source.data, share, ink, text };
  };
  const list = (index) => {
    const buttons = run.tests[index].map((sample) => {
      const button = make("button", run.texts ? sample.brief : undefined);
      if (!run.texts) button.append(sampleOf(sample.sample));
      button.title = sample.label;
      button.setAttribute("aria-label", `${sample.label}, row ${sample.row}`);
      const wrong = sample.answer !== null && sample.answer !== sample.label;
      button.classList.toggle("wrong", wrong);
      button.addEventListener("click", () => ask(sample, button));
      return button;
    });
    at("samples").replaceChildren(...buttons);
    ask(run.tests[index][0], buttons[0]);
  };
  options("domain", run.tests.map((samples) => samples[0].domain), list);
  list(0);

  // ---- accuracy
  run.domains.forEach(([name, colour], index) => {
    const changed = (shown) => {
      for (const part of ["dots", "intervals"]) model(`${part}-${index}`).visible = shown;
    };
    at("domains").append(choice("checkbox", name, colour, true, changed));
  });
})();
