"""Structured text: logs, JSON, YAML, CSV, XML, SQL, configuration, tables, timetables, invoices.

Each maker takes a seeded generator and yields the lines of one document. Names of hosts, people and
places are invented; addresses come from the ranges reserved for documentation.
"""

import json
from collections.abc import Iterator
from datetime import datetime, timedelta
from random import Random

from exl2flow.calibration_data.words import FOODS, HOSTS, PARTS, SERVICES, SURNAMES, TOWNS

BROWSERS = ("Mozilla/5.0 (X11; Linux x86_64)", "curl/8.5.0", "Wget/1.21.4", "feedreader/2.3")


def _moment(rng: Random) -> datetime:
    return datetime(2015, 1, 1) + timedelta(seconds=rng.randint(0, 300_000_000))


def _address(rng: Random) -> str:
    return f"{rng.choice(('192.0.2', '198.51.100', '203.0.113'))}.{rng.randint(1, 254)}"


def _hex(rng: Random, digits: int) -> str:
    return f"{rng.getrandbits(4 * digits):0{digits}x}"


def access_log(rng: Random) -> Iterator[str]:
    """Yield lines of a web server in the common log format."""
    now = _moment(rng)
    for _ in range(rng.randint(11, 16)):
        now += timedelta(seconds=rng.randint(0, 40))
        page = rng.choice(("", "index.html", "feed.xml", f"items/{rng.randint(1, 9999)}", "cart"))
        query = rng.choice(("", "", f"?page={rng.randint(1, 30)}&sort=price"))
        yield (
            f"{_address(rng)} - - [{now:%d/%b/%Y:%H:%M:%S} +0000] "
            f'"{rng.choice(("GET", "GET", "POST", "HEAD"))} /{page}{query} HTTP/1.1" '
            f'{rng.choice((200, 200, 200, 301, 304, 404, 500))} {rng.randint(0, 60000)} "-" '
            f'"{rng.choice(BROWSERS)}"'
        )


def service_log(rng: Random) -> Iterator[str]:
    """Yield the log of one program: key=value pairs and one failure with its traceback."""
    now, service = _moment(rng), rng.choice(SERVICES)
    failure = rng.randint(4, 12)
    for number in range(rng.randint(16, 22)):
        now += timedelta(milliseconds=rng.randint(1, 4000))
        stamp = f"{now.isoformat(timespec='milliseconds')}Z"
        if number == failure:
            yield from (
                f"{stamp} ERROR {service} request failed id={_hex(rng, 8)}",
                "Traceback (most recent call last):",
                f'  File "/srv/{service}/worker.py", line {rng.randint(20, 400)}, in handle',
                f"    row = self.rows[{rng.randint(10, 99)}]",
                "IndexError: list index out of range",
            )
            continue
        yield (
            f"{stamp} {rng.choice(('INFO ', 'INFO ', 'DEBUG', 'WARN '))} {service} "
            + rng.choice(
                (
                    f"request id={_hex(rng, 8)} status=200 elapsed_ms={rng.uniform(0.4, 900):.1f}",
                    f"cache hits={rng.randint(0, 5000)} misses={rng.randint(0, 300)}",
                    f"pool connections={rng.randint(1, 32)}/32 waiting={rng.randint(0, 9)}",
                    f"retry attempt={rng.randint(1, 5)} host={rng.choice(HOSTS)} backoff_s=2",
                )
            )
        )


def boot_log(rng: Random) -> Iterator[str]:
    """Yield a small computer's first seconds, timestamped from power-on."""
    seconds, host = 0.0, rng.choice(HOSTS)
    for _ in range(rng.randint(18, 26)):
        seconds += rng.expovariate(6)
        device = (
            f"{rng.choice(('usb', 'pci', 'mmc', 'i2c'))} {rng.randint(0, 7)}-{rng.randint(1, 4)}"
        )
        base = rng.getrandbits(20) << 12
        yield (
            f"[{seconds:>12.6f}] "
            + rng.choice(
                (
                    f"{device}: new device, vendor={_hex(rng, 4)} product={_hex(rng, 4)}",
                    f"memory: [0x{base:010x}-0x{base + 0xFFFFF:010x}] reserved",
                    f"eth{rng.randint(0, 1)}: link up, {rng.choice((100, 1000))} Mbit/s",
                    f"{host} init: started unit {rng.choice(SERVICES)}.service",
                    f"thermal zone{rng.randint(0, 3)}: {rng.uniform(28, 71):.1f} C",
                )
            )
        )


def json_records(rng: Random) -> Iterator[str]:
    """Yield nested JSON, indented or one record per line."""
    records = [
        {
            "id": f"{_hex(rng, 8)}-{_hex(rng, 4)}-4{_hex(rng, 3)}-a{_hex(rng, 3)}-{_hex(rng, 12)}",
            "owner": {"surname": rng.choice(SURNAMES), "town": rng.choice(TOWNS)},
            "created": f"{_moment(rng).isoformat()}Z",
            "active": rng.choice((True, False, None)),
            "readings": [round(rng.gauss(20, 6), 2) for _ in range(rng.randint(0, 5))],
            "tags": rng.sample(SERVICES, rng.randint(0, 3)),
        }
        for _ in range(rng.randint(4, 7))
    ]
    if rng.random() < 0.5:
        yield json.dumps({"total": len(records), "records": records}, indent=2, ensure_ascii=False)
    else:
        yield from (json.dumps(record, ensure_ascii=False) for record in records)


def yaml_service(rng: Random) -> Iterator[str]:
    """Yield a deployment description in YAML."""
    yield from (f"# deployed {_moment(rng):%Y-%m-%d}", 'version: "3"', "services:")
    for service in rng.sample(SERVICES, rng.randint(3, 5)):
        port = rng.randint(1024, 65000)
        yield from (
            f"  {service}:",
            f"    image: registry.example.org/{service}:{rng.randint(0, 4)}.{rng.randint(0, 30)}",
            f"    replicas: {rng.randint(1, 6)}",
            f'    ports: ["{port}:{rng.choice((80, 8080, 9000))}"]',
            "    environment:",
            f"      LOG_LEVEL: {rng.choice(('info', 'debug', 'warning'))}",
            f"      TIMEOUT_SECONDS: {rng.randint(5, 90)}",
            "    limits:",
            f"      cpu: {rng.choice((0.25, 0.5, 1, 2))}",
            f"      memory: {rng.choice((128, 256, 512, 2048))}M",
            f"    depends_on: [{', '.join(rng.sample(HOSTS, rng.randint(0, 2)))}]",
        )


def configuration(rng: Random) -> Iterator[str]:
    """Yield four configuration files, among them TOML, a web server and a scheduler."""
    service, host, port = rng.choice(SERVICES), rng.choice(HOSTS), rng.randint(1024, 65000)
    blocks = [
        f'[{service}]\nhost = "{host}.example.net"\nport = {port}\n'
        f"workers = {rng.randint(1, 64)}\ntimeout = {rng.uniform(0.5, 30):.1f}  # seconds\n"
        f'levels = ["{rng.choice(SERVICES)}", "{rng.choice(SERVICES)}"]\nverbose = false\n',
        f"server {{\n    listen {rng.choice((80, 8080))};\n    server_name {host}.example.org;\n"
        f"    location /{service}/ {{\n        proxy_pass http://127.0.0.1:{port};\n"
        f"        proxy_read_timeout {rng.randint(10, 120)}s;\n    }}\n}}\n",
        f"# minute hour day month weekday command\n{rng.randint(0, 59)} {rng.randint(0, 23)} * * * "
        f"/usr/local/bin/{service} --prune --keep {rng.randint(3, 60)}\n"
        f"*/{rng.randint(2, 30)} * * * {rng.randint(1, 5)} /usr/local/bin/probe {host}\n",
        f"[Unit]\nDescription={service.capitalize()} daemon\nAfter=network.target\n\n[Service]\n"
        f"ExecStart=/opt/{service}/bin/serve --port {port}\nRestart=on-failure\n"
        f"RestartSec={rng.randint(1, 20)}\n\n[Install]\nWantedBy=multi-user.target\n",
        f"host {host}\n    hostname {_address(rng)}\n    port {rng.randint(22, 2222)}\n"
        "    user deploy\n    identityfile ~/.ssh/id_ed25519\n    serveraliveinterval 30\n",
    ]
    yield from rng.sample(blocks, 4)


def csv_measurements(rng: Random) -> Iterator[str]:
    """Yield the readings of a few stations as comma-separated values."""
    now = _moment(rng).replace(minute=0, second=0)
    yield "station,time,temperature_c,humidity_pct,pressure_hpa,wind_m_s,remark"
    for _ in range(rng.randint(20, 30)):
        now += timedelta(minutes=10 * rng.randint(1, 6))
        remark = rng.choice(("", "", "", '"rain, light"', "sensor cleaned", "gust"))
        yield (
            f"{rng.choice(TOWNS)},{now:%Y-%m-%dT%H:%M},{rng.gauss(11, 8):.1f},"
            f"{rng.randint(24, 100)},{rng.gauss(1013, 9):.1f},{abs(rng.gauss(4, 3)):.1f},{remark}"
        )


def xml_records(rng: Random) -> Iterator[str]:
    """Yield a stock list in XML."""
    yield from ('<?xml version="1.0" encoding="UTF-8"?>', f'<stock depot="{rng.choice(TOWNS)}">')
    for part in rng.sample(PARTS, rng.randint(5, 8)):
        yield from (
            f'  <item sku="{rng.choice("ABCDEF")}-{rng.randint(10000, 99999)}">',
            f"    <name>{part}</name>",
            f'    <price currency="EUR">{rng.randint(5, 4900) / 100:.2f}</price>',
            f"    <count>{rng.randint(0, 2500)}</count>",
            f'    <shelf row="{rng.randint(1, 40)}" level="{rng.randint(1, 6)}"/>',
            "  </item>",
        )
    yield "</stock>"


def sql_session(rng: Random) -> Iterator[str]:
    """Yield INSERT statements and a query over the rows with its true result."""
    rows = [
        (number, rng.choice(SURNAMES), rng.choice(TOWNS[:5]), rng.randint(100, 99999) / 100)
        for number in range(1, rng.randint(9, 14))
    ]
    yield "INSERT INTO payments (id, payer, town, amount) VALUES"
    yield ",\n".join(f"  ({a}, '{b}', '{c}', {d:.2f})" for a, b, c, d in rows) + ";"
    yield from (
        "",
        "SELECT town, count(*) AS n, sum(amount) AS total",
        "FROM payments GROUP BY town ORDER BY town;",
        "",
        " town         |  n |     total",
        "--------------+----+----------",
    )
    for town in sorted({row[2] for row in rows}):
        amounts = [row[3] for row in rows if row[2] == town]
        yield f" {town:<12} | {len(amounts):>2} | {sum(amounts):>9.2f}"


def test_run(rng: Random) -> Iterator[str]:
    """Yield the report of a test runner with one failing assertion."""
    failed = rng.randint(2, 9)
    total = rng.randint(12, 18)
    values = [rng.randint(1, 99) for _ in range(6)]
    for number in range(total):
        name = f"{rng.choice(SERVICES)}_{rng.choice(('parses', 'rejects', 'orders', 'keeps'))}"
        state = "FAILED" if number == failed else "PASSED"
        share = 100 * (number + 1) // total
        yield f"tests/test_{name}_{rng.choice(HOSTS)}.py {state:<7} [{share:>3}%]"
    yield from (
        "",
        f">       assert total(rows) == {sum(values[1:])}",
        f"E       assert {sum(values)} == {sum(values[1:])}",
        f"E        +  where {sum(values)} = total({values})",
        "",
        f"==== 1 failed, {total - 1} passed in {rng.uniform(0.2, 40):.2f}s ====",
    )


def shell_session(rng: Random) -> Iterator[str]:
    """Yield shell commands with their listings."""
    host, service = rng.choice(HOSTS), rng.choice(SERVICES)
    yield from (f"deploy@{host}:~$ ls -l /var/lib/{service}", f"total {rng.randint(20, 9000)}")
    sizes = []
    for _ in range(rng.randint(8, 13)):
        sizes.append(rng.randint(10, 9_999_999))
        yield (
            f"-rw-r--r-- 1 {service:<9} {service:<9} {sizes[-1]:>8} {_moment(rng):%b %d %H:%M} "
            f"{rng.choice(TOWNS).lower()}-{_hex(rng, 4)}.{rng.choice(('db', 'log', 'tmp', 'gz'))}"
        )
    yield from (
        f"deploy@{host}:~$ stat -c %s /var/lib/{service}/* | awk '{{s += $1}} END {{print s}}'",
        f"{sum(sizes)}",
        f"deploy@{host}:~$ sha256sum release.tar.gz",
        f"{_hex(rng, 64)}  release.tar.gz",
        f"deploy@{host}:~$ uptime",
        f" {_moment(rng):%H:%M:%S} up {rng.randint(1, 400)} days, load average: "
        + ", ".join(f"{abs(rng.gauss(0.7, 0.5)):.2f}" for _ in range(3)),
    )


def hex_dump(rng: Random) -> Iterator[str]:
    """Yield bytes by offset next to their printable characters."""
    words = " ".join(rng.choice(TOWNS + HOSTS) for _ in range(14)).encode()
    noise = bytes(rng.getrandbits(8) for _ in range(112))
    data = noise[:16] + words + noise[16:]
    for offset in range(0, len(data), 16):
        chunk = data[offset : offset + 16]
        shown = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in chunk)
        yield f"{offset:08x}  {chunk[:8].hex(' '):<23}  {chunk[8:].hex(' '):<23}  |{shown}|"


def instrument_table(rng: Random) -> Iterator[str]:
    """Yield an aligned table of readings with uncertainties, in the style of a lab report."""
    unit, scale = rng.choice((("mV", 3.0), ("kHz", 40.0), ("mol/l", 0.2), ("µm", 12.0)))
    yield from (
        f"Table {rng.randint(1, 12)}. Response in {unit} at 5 settings, n = {rng.randint(3, 30)}.",
        "",
        "| run | " + " | ".join(f"setting {number}" for number in range(1, 6)) + " | drift |",
        "|:--|" + "--:|" * 6,
    )
    for number in range(1, rng.randint(10, 16)):
        means = (scale * step * rng.gauss(1, 0.04) for step in range(1, 6))
        cells = [f"{mean:.3f} ± {scale * rng.uniform(0.002, 0.05):.3f}" for mean in means]
        yield f"| {number:02d} | {' | '.join(cells)} | {rng.gauss(0, 0.8):+.2f} % |"


def timetable(rng: Random) -> Iterator[str]:
    """Yield the departures of a country bus line."""
    stops = rng.sample(TOWNS, rng.randint(6, 9))
    starts = sorted(rng.sample(range(300, 1300, 5), 7))
    yield from (f"Line {rng.randint(1, 480)}: {stops[0]} – {stops[-1]}. Mondays to Fridays.", "")
    minutes = 0
    for stop in stops:
        times = " ".join(f"{(s + minutes) // 60:02d}:{(s + minutes) % 60:02d}" for s in starts)
        yield f"{stop:<14} {times}"
        minutes += rng.randint(3, 14)
    yield f"\nNo service on public holidays. Single fare {rng.randint(18, 74) / 10:.2f}."


def price_list(rng: Random) -> Iterator[str]:
    """Yield a market stall's offers with discounts."""
    yield from (f"{rng.choice(TOWNS)} farm shop, week {rng.randint(1, 52)}", "")
    for food in rng.sample(FOODS, rng.randint(8, 12)):
        old, cut = rng.randint(90, 1900), rng.choice((0, 0, 10, 15, 25))
        offer = f"  now {old * (100 - cut) / 10000:.2f} (-{cut} %)" if cut else ""
        yield f"* {food}: {old / 100:.2f}{offer}"
    yield f"\nOpen Tue–Sat {rng.randint(7, 9)}:30–{rng.randint(16, 19)}:00. Cash or card."


def invoice(rng: Random) -> Iterator[str]:
    """Yield an invoice with correct sums."""
    day, total = _moment(rng), 0
    yield from (
        f"INVOICE {day:%Y}-{rng.randint(1, 9999):04d}",
        f"{rng.choice(SURNAMES)} & {rng.choice(SURNAMES)}, {rng.choice(TOWNS)}",
        f"Date: {day:%d %B %Y}   Due: {day + timedelta(days=30):%d %B %Y}",
        "",
        "qty  item                      each     amount",
    )
    for part in rng.sample(PARTS, rng.randint(5, 9)):
        count, cents = rng.randint(1, 60), rng.randint(15, 3900)
        total += count * cents
        yield f"{count:>3}  {part:<22} {cents / 100:>7.2f} {count * cents / 100:>10.2f}"
    tax = round(total * 0.2)
    yield from (
        f"{'net':>34} {total / 100:>10.2f}",
        f"{'tax 20 %':>34} {tax / 100:>10.2f}",
        f"{'to pay':>34} {(total + tax) / 100:>10.2f}",
    )


def results_table(rng: Random) -> Iterator[str]:
    """Yield a league table after a full round robin of random scores."""
    teams = rng.sample(TOWNS, 6)
    table = {team: [0, 0, 0, 0, 0] for team in teams}  # won, drawn, lost, for, against
    for index, home in enumerate(teams):
        for away in teams[index + 1 :]:
            ours, theirs = rng.randint(0, 4), rng.randint(0, 3)
            yield f"{home} {ours}–{theirs} {away}"
            for team, made, let in ((home, ours, theirs), (away, theirs, ours)):
                table[team][0 if made > let else 1 if made == let else 2] += 1
                table[team][3] += made
                table[team][4] += let
    yield from ("", "team            W  D  L  goals  points")
    order = sorted(teams, key=lambda team: (-3 * table[team][0] - table[team][1], team))
    for team in order:
        won, drawn, lost, made, let = table[team]
        yield (f"{team:<14} {won:>2} {drawn:>2} {lost:>2}  {made}:{let:<4} {3 * won + drawn:>5}")


def weather_report(rng: Random) -> Iterator[str]:
    """Yield a forecast in short sentences for a few places and days."""
    skies = ("bright", "overcast", "showery", "foggy until noon", "clear and cold", "thundery")
    winds = ("north", "north-east", "east", "south", "south-west", "west")
    for town in rng.sample(TOWNS, rng.randint(5, 7)):
        low = rng.randint(-9, 15)
        yield (
            f"{town}: {rng.choice(skies)}, {low} to {low + rng.randint(3, 12)} °C, wind "
            f"{rng.choice(winds)} {rng.randint(5, 60)} km/h, rain {rng.randint(0, 100)} %. "
            f"Sunrise {rng.randint(5, 7)}:{rng.randint(0, 59):02d}, sunset "
            f"{rng.randint(17, 21)}:{rng.randint(0, 59):02d}. Tomorrow {rng.choice(skies)}."
        )
