"""Words of the demo's companies and customers. Data only.

Any change to a list changes every generated file; the demo model should then be retrained.
"""


def _words(text: str) -> tuple[str, ...]:
    """Return the words of a text, split on whitespace."""
    return tuple(text.split())


def _phrases(text: str) -> tuple[str, ...]:
    """Return the phrases of a text, split on commas, because they contain spaces."""
    return tuple(" ".join(part.split()) for part in text.split(",") if part.strip())


# Surnames include trades (Baker, Mason, Banks) on purpose: the industry word decides, not the name.
SURNAMES = _words("""
    Abbott Acosta Adler Ahmed Alvarez Anders Archer Arnold Ashby Atkins Avery Bailey Baker Banks
    Barker Barlow Barnes Barrett Bates Becker Bell Bennett Berger Bishop Blake Bowen Boyd Bradley
    Brandt Brewer Briggs Brooks Bryant Burke Byrne Calloway Campbell Carey Carter Castillo Chan
    Chandler Chavez Clarke Coleman Collins Conway Cooper Correa Costa Crane Crosby Cruz Curtis
    Dalton Daniels Davies Dawson Decker Delgado Dempsey Diaz Dixon Donovan Doyle Drake Duncan
    Dunn Duran Eaton Elliott Ellis Engel Espinoza Evans Farrell Faulkner Ferguson Fischer
    Fleming Fletcher Flynn Foster Fowler Fraser Fuentes Gallagher Garner Garza Gibson Gill Glover
    Goodwin Grant Graves Greene Griffin Gupta Guthrie Hale Hampton Hardy Harmon Harris Hartley
    Hayes Heath Hendricks Herrera Higgins Hobbs Hoffman Holloway Hughes Hunter Ibarra Ingram
    Irwin Jacobs James Jarvis Jennings Jensen Jimenez Jordan Kane Kaufman Keller Kemp Kennedy
    Khan Kirby Klein Knight Kramer Lambert Larson Lawson Leblanc Lindgren Lloyd Logan Lopez
    Lowe Lucas Lynch Maddox Malone Marsh Mason Mathis Maxwell Mccann Mccarthy Mendez Mercer
    Meyer Middleton Miller Molina Monroe Montes Morales Morgan Morrow Moss Mueller Murphy Nash
    Navarro Neal Nguyen Nielsen Nolan Norris Novak Obrien Ochoa Olsen Ortega Osborne Owen
    Palmer Park Parrish Patel Payne Pearce Perkins Petersen Phelps Pierce Pittman Porter Potts
    Powell Pratt Prescott Quinn Ramsey Randall Rasmussen Reeves Reid Reyes Rhodes Riley Rivera
    Robbins Rojas Rosales Rossi Rowe Rubio Russo Ryan Salazar Sanders Santos Saunders Sawyer
    Schmidt Sellers Sharma Shaw Shepherd Silva Simmons Sinclair Singh Skinner Sloan Solomon
    Spencer Stafford Stanton Stein Stokes Sutton Swanson Tanner Taylor Temple Thornton Todd
    Torres Trevino Tucker Turner Tyler Underwood Valdez Vance Vargas Vaughn Velasquez Vogel
    Wagner Walker Walsh Walters Warner Watkins Weaver Webb Weber Welch Whitaker Wiggins Wilcox
    Winters Wong Woodward Yates York Young Zamora Zhang Zimmerman
""")

PLACES = _words("""
    Aberdeen Albany Alder Arden Ashford Aspen Austin Avon Bayview Belmont Berkeley Blackwater
    Boulder Brighton Bristol Bristow Brookfield Burlington Calgary Cambridge Camden Canterbury
    Carlisle Cedar Charleston Chelsea Chester Clifton Clyde Concord Copenhagen Cornwall Dakota
    Dayton Denver Devon Dover Dublin Dundee Durham Eastgate Edgewater Elmwood Essex Exeter
    Fairview Falcon Geneva Georgetown Glasgow Glenwood Granville Greenwich Hamilton Hampshire
    Harrow Hartford Highland Hillcrest Houston Hudson Inverness Kensington Kent Kingston
    Lakeside Lancaster Leeds Lincoln Lisbon Lexington Madison Maplewood Marlow Medway Melbourne
    Meridian Midland Milton Monterey Nairobi Newport Norfolk Northgate Norwich Oakland Oakridge
    Orlando Oslo Oxford Pacific Pembroke Phoenix Plymouth Portland Quebec Raleigh Redwood
    Richmond Riverside Rochester Salem Savannah Seattle Severn Sheffield Somerset Southport
    Stockholm Stratford Suffolk Surrey Sydney Thames Toronto Trenton Tyne Valencia Vienna
    Wakefield Warwick Wellington Westbrook Winchester Windsor Yorkshire Zurich
""")

INVENTED = _words("""
    Acme Aeon Aether Alto Altura Amber Apex Aquila Arbor Arcadia Argo Aria Astra Atlas Aurora
    Avanti Axiom Azure Beacon Birch Bluebird Bluestone Boreal Brio Cadence Calyx Canopy Cascade
    Catalyst Celeste Centra Cerulean Cirrus Citadel Clarion Cobalt Compass Copperfield Corvus
    Crescent Crestline Crimson Cygnus Delphi Delta Dynamo Echo Eclipse Element Elevate Elysian
    Ember Emerald Envoy Equinox Everest Evergreen Fable Fern Firefly Flint Fulcrum Fusion Galaxy
    Garnet Glacier Golden Granite Halcyon Harbor Harvest Hawthorn Helix Heron Horizon Icon
    Ignite Indigo Infinity Ion Iris Ivory Jade Jubilee Juniper Keystone Kestrel Kite Lantern
    Lark Laurel Legacy Liberty Lumen Luna Lyra Magnolia Majestic Maple Mariner Matrix Maven
    Mira Momentum Monarch Nebula Nexus Nimbus Noble Nova Novus Oak Oasis Obsidian Omega Onyx
    Opal Orbit Orchid Orion Osprey Paragon Pegasus Pinnacle Pioneer Pivot Polaris Prime Prism
    Pulse Quantum Quartz Quest Quill Radiant Raven Regal Ridge Ripple Rowan Sable Sage Sapphire
    Sequoia Sierra Silver Sky Solace Solstice Spark Spectrum Sterling Stratus Summit Sunrise
    Swift Tamarind Tempest Terra Titan Topaz Triton Trinity Umbra Union Unity Valiant Vanguard
    Vector Vega Velo Venture Verity Vertex Vista Vivid Voyager Willow Wren Xenon Zenith Zephyr
    Zinnia Zora
""")

SUFFIXES = _phrases("""
    Inc, LLC, Ltd, Group, PLC, and Sons, Holdings, Co, Partners, International, Corp, GmbH,
    Limited, Associates, & Co, Worldwide, & Daughters, Pty Ltd, Company, Brothers
""")

# Words that follow the name: "Hartley & Moss Solicitors", "Northgate Dental Clinic".
AFTER: dict[str, tuple[str, ...]] = {
    "Law Firm": _phrases("""
        Solicitors, Law, Law Firm, Law Offices, Law Office, Attorneys, Attorneys at Law,
        Legal, Legal Services, LLP, Barristers, Chambers, Litigation, Trial Lawyers,
        Lawyers, Injury Lawyers, Family Law, Criminal Defense, Defense Attorneys, Conveyancing,
        Notaries, Patent Attorneys, Immigration Law, Advocates, Counsel,
        Legal Counsel, Law Chambers, Employment Law,
    """),
    "Healthcare": _phrases("""
        Dental Clinic, Medical Center, Hospital, Health, Healthcare, Clinic, Dental, Dentistry,
        Pharmacy, Pharma, Pharmaceuticals, Physiotherapy, Pediatrics, Orthopedics, Medical,
        Family Medicine, Wellness Clinic, Nursing Home, Care Home, Hospice,
        Surgery Center, Eye Care, Optometry, Dermatology, Cardiology, Oncology, Radiology,
        Biotech, Therapeutics, Diagnostics, Urgent Care, Home Care, Physicians, Health System,
        Mental Health, Rehabilitation Center, Chiropractic, Veterinary Clinic
    """),
    "Technology": _phrases("""
        Software, Technologies, Technology, Robotics, Systems, Data, Data Systems, Cloud,
        Cloud Computing, Networks, Cybersecurity, Digital, Labs, Computing, Computers, Apps,
        Analytics, AI, Artificial Intelligence, Web Services, IT Services, IT Solutions, Hosting,
        Semiconductors, Microsystems, Interactive, Games Software, Telecom, Broadband, Internet,
        Blockchain, Machine Learning, Platforms, Code, Tech, Informatics, Online Services
    """),
    "Retail": _phrases("""
        Stores, Store, Supermarkets, Supermarket, Outlet, Boutique, Fashions, Fashion Outlet,
        Clothing, Apparel, Shoes, Footwear, Jewelers, Gifts, Toys, Toy Shop, Bookshop, Books,
        Grocers, Groceries, Market, Department Store, Home Furnishings, Furniture Store, Florist,
        Hardware Store, Electronics Store, Pet Shop, Shop, Shopping, Emporium, Bazaar,
        Convenience Stores, Garden Centre, Sporting Goods, Cosmetics, Retail, Outfitters,
        Mercantile
    """),
    "Consulting": _phrases("""
        Consulting, Consultants, Consultancy, Advisory, Advisors, Management Consulting,
        Strategy, Business Advisory, Business Consultants, Strategic Advisors,
        Management Consultants, HR Consulting, Strategy Consulting,
        Change Management, Transformation Advisory, Process Consultants, Growth Advisors,
        Executive Coaching, Leadership Advisory, Business Strategy, Operations Consulting,
        Research & Advisory, Policy Advisors, Executive Search, Business Solutions,
        Performance Consulting
    """),
    "Manufacturing": _phrases("""
        Manufacturing, Steel, Steelworks, Industries, Fabrication, Metal Works, Machine Works,
        Machinery, Tools, Tooling, Plastics, Chemicals, Textiles, Foundry, Forge, Castings,
        Components, Auto Parts, Engines, Motors, Packaging, Paper Mills, Mills, Glassworks,
        Ceramics, Cement, Rubber, Electronics Manufacturing, Aerospace, Precision Parts, Bearings,
        Valves, Pumps, Industrial, Fasteners, Molding, Wire & Cable, Boilers, Turbines, Ironworks,
        Food Processing, Appliances
    """),
    "Finance": _phrases("""
        Capital, Bank, Banking, Savings Bank, Financial, Finance, Financial Services, Investments,
        Investment Management, Asset Management, Wealth Management, Wealth, Insurance, Assurance,
        Insurance Brokers, Credit Union, Credit, Loans, Lending, Mortgage Lending, Trust Bank,
        Securities, Brokerage, Private Equity, Equity Fund, Hedge Fund, Venture Capital, Fund,
        Accountants, Accounting, Accountancy, Tax Services, Payments, Pensions, Underwriters,
        Actuaries, Bookkeeping
    """),
    "Real Estate": _phrases("""
        Realty, Realtors, Real Estate, Properties, Property, Property Management,
        Estates, Estate Agents, Homes, Homebuilders, Land, Land Development, Lettings, Apartments,
        Housing, Residential, Condominiums, Property Developers, Developments, Villas, Leasing,
        Rentals, Commercial Property, Office Parks, Real Estate Brokers,
        Home Sales, Student Housing, Land Agents, Property Lettings, Mansions
    """),
    "Other": _phrases("""
        Primary School, High School, School, Academy, College, University, Kindergarten, Charity,
        Foundation, Relief Fund, Animal Shelter, Farms, Farm, Orchards, Dairy, Bakery, Bakers,
        Patisserie, Brewery, Winery, Vineyards, Hotel, Hotels, Inn, Restaurant, Restaurants, Bistro,
        Cafe, Pizzeria, Catering, Theatre, Cinema, Museum, Orchestra, Ballet, Opera House,
        Art Gallery, Football Club, Golf Club, Gymnasium, Church, Parish Council, Airlines,
        Airways, Shipping, Freight, Logistics, Haulage, Railway, Ferries, Taxis, Travel, Tours,
        Construction, Builders, Plumbing, Roofing, Landscaping, Cleaning Services, Zoo, Publishing,
        Press, Radio, Film Studios, Records, Mining, Fisheries, Forestry, Electric Power,
        Water Board, Security Guards, Photography
    """),
}

# Words that come before the name: "Law Offices of Hartley", "Bank of Oxford".
BEFORE: dict[str, tuple[str, ...]] = {
    "Law Firm": _phrases("Law Offices of, Law Office of, Attorneys of, Chambers of"),
    "Healthcare": _phrases("Hospital of, Clinic of, Medical Center of, Doctors of"),
    "Technology": _phrases("Software by, Digital Labs of, Computers by"),
    "Retail": _phrases("Fashion House of, Boutique of, Gifts by, Shoes by"),
    "Consulting": _phrases("Consultants of, Business Advisors of, Strategy by"),
    "Manufacturing": _phrases("Steelworks of, Foundry of, Mills of"),
    "Finance": _phrases("Bank of, Credit Union of, Savings Bank of, Insurance Company of"),
    "Real Estate": _phrases("Homes by, Realtors of, Apartments at, Residences at"),
    "Other": _phrases("""
        University of, College of, Museum of, Friends of, School of, Church of, Diocese of, City of,
        Hotel, Cafe, Restaurant
    """),
}

# Word endings joined to an invented name: "NovaSoft", "ZenithPay".
FUSED: dict[str, tuple[str, ...]] = {
    "Law Firm": _words("Legal Law"),
    "Healthcare": _words("Med Health Pharma Care"),
    "Technology": _words("Soft Tech Data Cloud Byte Net"),
    "Retail": _words("Mart Shop Store"),
    "Consulting": _words("Consult Advise"),
    "Manufacturing": _words("Steel Forge Fab Works"),
    "Finance": _words("Pay Bank Fund Capital"),
    "Real Estate": _words("Homes Realty Estates"),
    "Other": _words("Air School Travel Foods"),
}

FIRST_NAMES = _words("""
    Aaron Abigail Adam Adriana Aisha Alan Alice Amir Amy Ana Andre Angela Anita Anna Anthony
    Audrey Beatrice Ben Bianca Brenda Brian Bruno Caleb Camila Carl Carmen Caroline Cesar Chloe
    Claire Colin Cora Cynthia Daisy Damon Dana Daniel Diana Diego Dominic Doris Edgar Edith
    Elena Eli Ella Emma Enrique Erica Ethan Eva Felix Fiona Frank Gabriel Gail George Gloria
    Grace Greg Hannah Harold Hector Heidi Helen Henry Hugo Ian Ines Irene Isaac Ivan Jack Jade
    Jamal Jane Javier Jean Joan Joel Joyce Juan Julia Karen Karl Kayla Keith Kelly Kim Kyle
    Lara Laura Leah Leo Lewis Lila Linda Lorenzo Lucia Luis Luna Lydia Malik Marco Maria Mark
    Martha Maya Megan Miguel Mila Mohamed Molly Nadia Naomi Nathan Nina Noah Nora Olga Oliver
    Omar Oscar Pablo Patrick Paula Peter Priya Rachel Rafael Ralph Raul Rebecca Rita Robert
    Rosa Ruth Samir Samuel Sandra Sara Sean Silvia Simon Sofia Stella Steven Susan Tanya Tara
    Teresa Theo Thomas Tina Uma Vera Victor Vincent Wanda Wendy Willa Xavier Yara Yusuf Zoe
""")

# City and the country it lies in.
CITIES: tuple[tuple[str, str], ...] = (
    ("Amsterdam", "Netherlands"), ("Athens", "Greece"), ("Atlanta", "United States"),
    ("Auckland", "New Zealand"), ("Austin", "United States"), ("Bangkok", "Thailand"),
    ("Barcelona", "Spain"), ("Berlin", "Germany"), ("Birmingham", "United Kingdom"),
    ("Bogota", "Colombia"), ("Boston", "United States"), ("Bristol", "United Kingdom"),
    ("Brussels", "Belgium"), ("Budapest", "Hungary"), ("Buenos Aires", "Argentina"),
    ("Cairo", "Egypt"), ("Calgary", "Canada"), ("Cape Town", "South Africa"),
    ("Casablanca", "Morocco"), ("Chicago", "United States"), ("Copenhagen", "Denmark"),
    ("Cork", "Ireland"), ("Dallas", "United States"), ("Delhi", "India"),
    ("Denver", "United States"), ("Dublin", "Ireland"), ("Edinburgh", "United Kingdom"),
    ("Frankfurt", "Germany"), ("Geneva", "Switzerland"), ("Glasgow", "United Kingdom"),
    ("Hamburg", "Germany"), ("Hanoi", "Vietnam"), ("Helsinki", "Finland"),
    ("Houston", "United States"), ("Istanbul", "Turkey"), ("Jakarta", "Indonesia"),
    ("Kingston", "Jamaica"), ("Kuala Lumpur", "Malaysia"), ("Lagos", "Nigeria"),
    ("Leeds", "United Kingdom"), ("Lima", "Peru"), ("Lisbon", "Portugal"),
    ("London", "United Kingdom"), ("Lyon", "France"), ("Madrid", "Spain"),
    ("Manila", "Philippines"), ("Melbourne", "Australia"), ("Mexico City", "Mexico"),
    ("Milan", "Italy"), ("Montreal", "Canada"), ("Mumbai", "India"), ("Munich", "Germany"),
    ("Nairobi", "Kenya"), ("New York", "United States"), ("Osaka", "Japan"), ("Oslo", "Norway"),
    ("Paris", "France"), ("Perth", "Australia"), ("Portland", "United States"),
    ("Prague", "Czechia"), ("Quito", "Ecuador"), ("Rome", "Italy"), ("Santiago", "Chile"),
    ("Sao Paulo", "Brazil"), ("Seattle", "United States"), ("Seoul", "South Korea"),
    ("Singapore", "Singapore"), ("Stockholm", "Sweden"), ("Sydney", "Australia"),
    ("Tallinn", "Estonia"), ("Tokyo", "Japan"), ("Toronto", "Canada"), ("Valencia", "Spain"),
    ("Vancouver", "Canada"), ("Vienna", "Austria"), ("Warsaw", "Poland"),
    ("Wellington", "New Zealand"), ("Zagreb", "Croatia"), ("Zurich", "Switzerland"),
)  # fmt: skip
