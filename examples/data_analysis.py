"""Sales figures analysed in Python, handed over as a file to JavaScript, which works out how fast each region grows.

python examples/data_analysis.py [directory for the pictures]
"""

import base64
import sys
from pathlib import Path

from skerry import Sandbox

ANALYSIS = """
import json
import pandas as pd
import matplotlib.pyplot as plt

sales = pd.DataFrame({
    "month": pd.date_range("2025-01-01", periods=6, freq="MS").strftime("%b"),
    "north": [120, 135, 148, 160, 155, 190],
    "south": [200, 190, 210, 220, 260, 250],
    "west": [80, 95, 90, 120, 140, 165],
})
totals = sales.set_index("month").sum()

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
sales.plot(x="month", ax=left, marker="o", title="Sales by month", ylabel="thousand €")
totals.plot.bar(ax=right, title="Half-year by region", ylabel="thousand €", rot=0)
figure.tight_layout()

with open("/tmp/sales_data.json", "w") as file:
    json.dump(sales.to_dict("records"), file)
sales
"""

GROWTH = """
import { readFileSync } from 'node:fs'

const sales = JSON.parse(readFileSync('/tmp/sales_data.json', 'utf8'))
const regions = Object.keys(sales[0]).filter(name => name !== 'month')
const rate = (from, to) => Math.round((to / from - 1) * 1000) / 10
regions.map(region => ({
  region,
  growth: rate(sales[0][region], sales.at(-1)[region]),
  monthly: sales.slice(1).map((row, i) => rate(sales[i][region], row[region])),
}))
"""


def main(directory: Path) -> None:
    with Sandbox(ephemeral=True) as sandbox:
        analysis = sandbox.run_code(ANALYSIS).raise_for_error()
        growth = sandbox.run_code(GROWTH, language="javascript").raise_for_error()

    for number, picture in enumerate((result for result in analysis.results if result.png), 1):
        path = directory / f"sales-{number}.png"
        path.write_bytes(base64.b64decode(picture.png))
        print(f"{path}: {', '.join(panel['title'] for panel in picture.chart['panels'])}")

    (table,) = (result.data for result in analysis.results if result.data)
    print(*(f"{field['name']:>8}" for field in table["schema"]["fields"]))
    for record in table["records"]:
        print(*(f"{value:>8}" for value in record.values()))

    for row in growth.results[0].json_:
        print(f"{row['region']:>8} {row['growth']:+.1f} %   by month: {', '.join(f'{r:+.1f}' for r in row['monthly'])}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
